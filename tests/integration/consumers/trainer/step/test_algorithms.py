"""Every loss and advantage in a real step: what they need is provided, micro-batches change nothing; distillation."""

import copy
import math
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from consumers.trainer.algorithms import ADVANTAGES, LOSSES
from consumers.trainer.data.collate import MicroBatch
from consumers.trainer.data.groups import Group
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.step.build import reference_policy
from consumers.trainer.step.train_step import StepResult, TrainStep
from schemas.config import parse_config
from tests.support.models.tiny_model import make_tiny_model
from tests.support.trainer.train_steps import make_train_step
from tests.support.trainer.trajectories import make_groups, make_trajectory

MASKING = {"name": "m2po", "args": {"second_moment": 2.0}}
PROMPT = [5, 9, 14]
SAMPLES, LENGTH = 48, 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return load_model(make_tiny_model(tmp_path_factory.mktemp("tiny"), hidden=32, layers=1), "float32")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """A reference policy that differs."""
    folder = make_tiny_model(tmp_path_factory.mktemp("other"), seed=1, hidden=32, layers=1)
    return Policy(load_model(folder, "float32")).requires_grad_(False)


def make_step(model: PreTrainedModel, reference: Policy | None = None, **trainer: object) -> TrainStep:
    settings = {"optimizer": {"lr": 1e-3}, **trainer}
    return make_train_step(Policy(copy.deepcopy(model)), settings, reference=reference)


def run(step: TrainStep, groups: list[Group]) -> tuple[Tensor, StepResult, list[MicroBatch]]:
    """The step's gradient before clipping, its result, and the micro-batches as they were trained."""
    gradients: list[Tensor] = []
    seen: list[MicroBatch] = []
    forward = step._forward

    def look(parameters: object, limit: float) -> float:
        gradients.append(torch.cat([p.grad.flatten() for p in step.policy.parameters() if p.grad is not None]))
        return 0.0

    def note(part: MicroBatch, *rest: object) -> Tensor:
        seen.append(part)
        return forward(part, *rest)  # type: ignore[arg-type]

    step._forward = note  # type: ignore[method-assign]
    step.ranks.clip_grad_norm = look  # type: ignore[method-assign, assignment]
    result = step.run(step.planner.plan(groups).batch(), version=5)
    return gradients[0], result, seen


def gradient(step: TrainStep, groups: list[Group]) -> Tensor:
    return run(step, groups)[0]


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-3, atol=1e-5 * float(a.abs().max() + 1e-3))


def rollout_near(model: PreTrainedModel, groups: list[Group], noise: float = 0.3) -> list[Group]:
    """The same samples with log-probabilities that are near the model's, so that no loss is at its bounds alone."""
    generator = torch.Generator().manual_seed(0)
    policy, out = Policy(copy.deepcopy(model)), []
    for group in groups:
        samples = []
        for t, reward in group.samples:
            if not t.loss_mask.numpy().any():
                samples.append((t, reward))
                continue
            ids = torch.tensor(t.tokens.numpy().tolist())[None]
            with torch.no_grad():
                scores = policy(ids, ids[:, 1:], torch.ones(1, ids.shape[1] - 1, dtype=torch.bool)).logprobs[0]
            kept = int(t.loss_mask.numpy().sum())
            own = scores[len(scores) - kept :] + noise * torch.randn(kept, generator=generator)
            prompt = len(t.tokens) - kept
            made = make_trajectory(t.task_id, t.sample, prompt, kept, 3, logprobs=own.clamp(max=-1e-3).tolist())
            fields = {name: getattr(made, name) for name in made.__struct_fields__ if name != "schema"}
            samples.append((type(made)(**{**fields, "tokens": t.tokens}), reward))
        out.append(Group(group.task_id, samples))
    return out


@pytest.mark.parametrize("name", LOSSES.names)
@settings(max_examples=4)
@given(seed=st.integers(0, 1000), budget=st.integers(8, 120))
def test_losses_do_not_depend_on_micro_batching(model: PreTrainedModel, name: str, seed: int, budget: int) -> None:
    groups = rollout_near(model, make_groups([3, 1, 4], seed))
    trainer = {"loss": {"name": name}, "rejection": [{"level": "sequence", "upper": 1.3}]}
    whole = gradient(make_step(model, **trainer), groups)
    assert close(whole, gradient(make_step(model, micro_batch_tokens=budget, **trainer), groups))


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES.names) - {"gae"}))
@pytest.mark.parametrize("place", ["loss", "reward"])
def test_micro_batching_keeps_advantages_and_kl(model: PreTrainedModel, other: Policy, name: str, place: str) -> None:
    groups = rollout_near(model, make_groups([3, 1, 4], seed=4))
    trainer = {"advantage": {"name": name}, "kl": {"coef": 0.1, "place": place}}
    whole = gradient(make_step(model, other, **trainer), groups)
    assert close(whole, gradient(make_step(model, other, micro_batch_tokens=20, **trainer), groups))
    assert not close(whole, gradient(make_step(model, advantage={"name": name}), groups))


def logprobs_by(policy: Policy, micro: MicroBatch, temperature: float = 1.0) -> Tensor:
    with torch.no_grad():
        scores: Tensor = policy(micro.tokens, micro.targets, micro.mask, temperatures=[temperature]).logprobs
    return scores


def test_a_reference_equal_to_the_policy_adds_no_gradient(model: PreTrainedModel) -> None:
    groups = rollout_near(model, make_groups([3, 4], seed=1))
    same = Policy(copy.deepcopy(model)).requires_grad_(False)
    plain = gradient(make_step(model), groups)
    assert close(plain, gradient(make_step(model, same, kl={"coef": 5.0}), groups))


def test_kl_in_the_loss_pulls_towards_the_reference(model: PreTrainedModel, other: Policy) -> None:
    groups = rollout_near(model, make_groups([4, 4], seed=2), noise=0.0)
    step = make_step(model, other, kl={"coef": 1.0, "estimator": "k2"}, advantage={"name": "raw"})
    step.update.max_grad_norm = 1e9
    first = step.run(step.planner.plan(groups).batch(), version=5).metrics["reference_kl"]
    for version in range(6, 12):
        last = step.run(step.planner.plan(groups).batch(), version=version).metrics["reference_kl"]
    assert last < first


def test_the_reference_is_scored_at_the_sampling_temperature(model: PreTrainedModel, other: Policy) -> None:
    """Scaling the logits on one side only is a known mistake."""
    step = make_step(model, other, kl={"coef": 0.1})
    groups = [
        Group(group.task_id, [(msgspec.structs.replace(one, temperature=0.5), reward) for one, reward in group.samples])
        for group in make_groups([3], seed=3)
    ]
    _, _, (part,) = run(step, groups)
    assert part.reference_logprobs is not None
    assert torch.allclose(part.reference_logprobs, logprobs_by(other, part, 0.5), atol=1e-6)
    assert not torch.allclose(part.reference_logprobs, logprobs_by(other, part, 1.0), atol=1e-2)


def test_kl_in_the_reward_counts_against_the_tokens_before_it(model: PreTrainedModel, other: Policy) -> None:
    groups = [Group(0, [(make_trajectory(0, 0), 1.0), (make_trajectory(0, 1, 2, 5), 0.0)])]
    step = make_step(model, other, kl={"coef": 0.1, "estimator": "k1", "place": "reward"})
    _, _, (part,) = run(step, groups)
    reference = logprobs_by(other, part)
    for row, sequence in enumerate(part.sequence.tolist()):
        mask = part.mask[row]
        k1 = (part.rollout_logprobs[row] - reference[row])[mask].tolist()
        want = [(0.5, -0.5)[sequence] - 0.1 * sum(k1[t:]) for t in range(len(k1))]
        assert part.advantages[row][mask].tolist() == pytest.approx(want, abs=1e-5)
        assert part.advantages[row][~mask].abs().sum() == 0


def test_reinforce_pp_rewards_the_last_token_and_normalises_the_step(model: PreTrainedModel) -> None:
    groups = [Group(0, [(make_trajectory(0, 0), 1.0)]), Group(1, [(make_trajectory(1, 0, 2, 6), 0.0)])]
    _, _, parts = run(make_step(model, micro_batch_tokens=8, advantage={"name": "reinforce_pp"}), groups)
    values = {
        sequence: part.advantages[row][part.mask[row]]
        for part in parts
        for row, sequence in enumerate(part.sequence.tolist())
    }
    std = math.sqrt(0.4 * 0.6 * 10 / 9)
    assert values[0].tolist() == pytest.approx([0.6 / std] * 4, abs=1e-5)
    assert values[1].tolist() == pytest.approx([-0.4 / std] * 6, abs=1e-5)


def test_m2po_compares_the_policy_at_the_start_of_the_step_with_the_rollout_policy(model: PreTrainedModel) -> None:
    groups = rollout_near(model, make_groups([4, 4], seed=6), noise=2.0)
    step = make_step(model, loss=MASKING, micro_batch_tokens=30)
    start = Policy(copy.deepcopy(model))
    _, result, parts = run(step, groups)
    squares, kept = [], []
    for part in parts:
        mask = part.mask
        assert part.kept is not None
        squares += (logprobs_by(start, part) - part.rollout_logprobs)[mask].square().tolist()
        kept += part.kept[mask].tolist()
    limit = max(s for s, keep in zip(squares, kept, strict=True) if keep)
    chosen = [s for s in squares if s <= limit]
    rest = sorted(s for s in squares if s > limit)
    assert len(parts) > 1
    assert rest
    assert sum(chosen) / len(chosen) < 2.0 <= (sum(chosen) + rest[0]) / (len(chosen) + 1)
    assert kept == [s <= limit for s in squares]
    assert result.metrics["masked_fraction"] == pytest.approx(len(rest) / len(squares))


@pytest.mark.parametrize("proximal", ["recompute", "interpolate"])
def test_decoupled_ppo_gets_its_proximal_policy(model: PreTrainedModel, proximal: str) -> None:
    groups = rollout_near(model, make_groups([4, 4], seed=7))
    step = make_step(model, loss={"name": "decoupled_ppo", "proximal": proximal})
    start = Policy(copy.deepcopy(model))
    _, result, parts = run(step, groups)
    weights = []
    for part in parts:
        gap = logprobs_by(start, part) - part.rollout_logprobs
        age = 5 - part.versions  # 2 and 1
        gap = gap if proximal == "recompute" else torch.where(age == 2, gap / 2, 0.0)
        weights += gap[part.mask].exp().tolist()
    weights = [w if w <= 5 else 0.0 for w in weights]
    assert result.metrics["loss_weight"] == pytest.approx(sum(weights) / len(weights), rel=1e-4)


def test_rejected_tokens_are_counted_and_stay_in_the_denominator(model: PreTrainedModel) -> None:
    """The other convention divides by the kept tokens: the same filtered loss, 0.131 in place of 0.116."""
    groups = rollout_near(model, [Group(0, [(make_trajectory(0, 0, 3, 4), 1.0), (make_trajectory(0, 1, 3, 4), 0.0)])])
    step = make_step(model, rejection=[{"upper": 1.0}], loss={"name": "reinforce"})
    _, result, (part,) = run(step, groups)
    micro = part
    logprobs = logprobs_by(Policy(copy.deepcopy(model)), part)[micro.mask]
    ratio = (logprobs - micro.rollout_logprobs[micro.mask]).exp()
    kept = ratio <= 1.0
    losses = -micro.advantages[micro.mask] * ratio * logprobs
    assert 0 < int(kept.sum()) < 8
    assert result.metrics["rejected_fraction"] == pytest.approx(1 - int(kept.sum()) / 8)
    assert result.metrics["loss"] == pytest.approx(float(losses[kept].sum()) / 8, rel=1e-4)


def test_the_reference_is_loaded_when_there_is_a_penalty(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "m", hidden=32, layers=1)
    smallest = {
        "model": {"path": str(tmp_path / "m"), "dtype": "float32"},
        "train": {"name": "arithmetic"},
        "reward": {"terms": [{"name": "exact"}]},
    }
    assert reference_policy(parse_config(smallest), Ranks()) is None
    loaded = reference_policy(parse_config({**smallest, "trainer": {"kl": {"coef": 0.1}}}), Ranks())
    assert loaded is not None
    assert not any(p.requires_grad for p in loaded.parameters())


def rollout(policy: Policy, generator: torch.Generator, version: int) -> list[Group]:
    """What the student samples, with its log-probabilities."""
    ids = torch.tensor([PROMPT] * SAMPLES)
    found: list[torch.Tensor] = []
    with torch.no_grad():
        for _ in range(LENGTH):
            distribution = torch.log_softmax(policy.causal_lm(ids).logits[:, -1].float(), -1)
            token = torch.multinomial(distribution.exp(), 1, generator=generator)
            found.append(distribution.gather(1, token))
            ids = torch.cat([ids, token], 1)
    logprobs = torch.cat(found, 1).tolist()
    samples = []
    for index in range(SAMPLES):
        made = make_trajectory(0, index, len(PROMPT), LENGTH, version, logprobs=logprobs[index])
        fields = {name: getattr(made, name) for name in made.__struct_fields__ if name != "schema"}
        tokens = type(made.tokens).of(ids[index].tolist(), "i4")
        samples.append((type(made)(**{**fields, "tokens": tokens}), 0.0))
    return [Group(0, samples)]


def divergence(student: Policy, teacher: Policy) -> float:
    """KL(student || teacher) of the first token after the prompt, over the whole vocabulary."""
    with torch.no_grad():
        p, q = (torch.log_softmax(m.causal_lm(torch.tensor([PROMPT])).logits[0, -1], -1) for m in (student, teacher))
    return float((p.exp() * (p - q)).sum())


def test_the_student_comes_to_the_teacher(tmp_path: Path) -> None:
    student, teacher = (
        Policy(load_model(make_tiny_model(tmp_path / str(seed), seed=seed, hidden=32, layers=1), "float32"))
        for seed in (0, 1)
    )
    settings = {"kl": {"coef": 1.0}, "advantage": {"name": "raw"}, "optimizer": {"lr": 1e-2}, "steps": 40}
    step = make_train_step(student, settings, reference=teacher.requires_grad_(False))
    generator = torch.Generator().manual_seed(0)
    before = divergence(step.policy, teacher)
    seen = [
        step.run(step.planner.plan(rollout(step.policy, generator, v)).batch(), v).metrics["reference_kl"]
        for v in range(40)
    ]
    assert divergence(step.policy, teacher) < 0.2 * before
    assert sum(seen[-5:]) < 0.6 * sum(seen[:5])
