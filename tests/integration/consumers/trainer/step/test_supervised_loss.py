"""A step of three components, each with its own datasets, denominator and weight, against plain torch."""

import copy
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from consumers.trainer.data.groups import Group
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.step.build import build_train_step
from consumers.trainer.step.train_step import StepResult
from schemas.codec import Array
from schemas.config import parse_config
from schemas.errors import ConfigError
from schemas.messages import Trajectory
from tests.support.models.tiny_model import make_tiny_model
from tests.support.trainer.trajectories import make_groups

pytestmark = pytest.mark.integration

COEF = 0.7
TERMS: list[dict[str, Any]] = [
    {"name": "exact", "datasets": ["a"]},
    {"name": "supervised", "datasets": ["b"], "weight": 2.0},
    {"name": "supervised", "datasets": ["d"], "weight": 0.5},
    {"name": "teacher", "args": {"model": "x"}, "datasets": ["c"]},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return load_model(make_tiny_model(tmp_path_factory.mktemp("tiny"), hidden=32, layers=1), "float32")


def labelled(sizes: dict[str, int], seed: int = 8) -> list[Group]:
    """A group of each of these datasets; those of b and d have no log-probabilities, as given answers have."""
    generator = np.random.default_rng(seed)

    def change(sample: Trajectory, dataset: str) -> Trajectory:
        says = Array.of(-generator.uniform(0.1, 3.0, len(sample.tokens)), "f4") if dataset == "c" else None
        known = Array.of(np.zeros(len(sample.tokens)), "f4") if dataset in "bd" else sample.logprobs
        temperature = 0.7 if dataset in "bd" else 1.0
        return msgspec.structs.replace(
            sample, dataset=dataset, teacher_logprobs=says, logprobs=known, temperature=temperature
        )

    return [
        Group(group.task_id, [(change(sample, dataset), reward) for sample, reward in group.samples])
        for group, dataset in zip(make_groups(list(sizes.values()), seed=seed), sizes, strict=True)
    ]


def run(
    model: PreTrainedModel,
    groups: list[Group],
    packed: bool = True,
    terms: Sequence[dict[str, Any]] = TERMS,
    **trainer: Any,
) -> tuple[Tensor, StepResult, Any]:
    """The step's gradient before clipping, its result, and its plan."""
    config = parse_config(
        {
            "model": {"path": "in-memory", "dtype": "float32", "max_length": 64},
            "train": [{"name": "arithmetic", "label": label} for label in "abcde"[: 4 + (terms is not TERMS)]],
            "reward": {"terms": [*terms]},
            "sampling": {"max_tokens": 8},
            "trainer": {"optimizer": {"lr": 1e-3}, "kl": {"coef": COEF, "reference": "teacher"}, **trainer},
        }
    )
    policy = Policy(copy.deepcopy(model))
    policy.packed = policy.packed and packed
    step = build_train_step(config, policy=policy)
    gradients: list[Tensor] = []

    def look(parameters: object, limit: float) -> float:
        gradients.append(torch.cat([p.grad.flatten() for p in step.policy.parameters() if p.grad is not None]))
        return 0.0

    step.ranks.clip_grad_norm = look  # type: ignore[method-assign, assignment]
    plan = step.planner.plan(groups)
    result = step.run(plan.batch(), version=5)
    return torch.stack(gradients).sum(0), result, plan


def plain(model: PreTrainedModel, groups: list[Group]) -> tuple[Tensor, Tensor]:
    """Loss and gradient, one sequence at a time: PPO's surrogate, cross-entropy, and reverse KL, each a mean."""
    own = copy.deepcopy(model)
    parts: dict[str, list[Tensor]] = {"a": [], "bd": [], "c": []}
    counts = dict.fromkeys(parts, 0)
    for group in groups:
        baseline = np.mean([reward for _, reward in group.samples]) if group.samples else 0.0
        for sample, reward in group.samples:
            ids = torch.from_numpy(sample.tokens.numpy().astype(np.int64))
            chosen = torch.from_numpy(sample.loss_mask.numpy()[1:].astype(bool))
            scores = torch.log_softmax(own(ids[None]).logits[0, :-1].float(), -1)
            said = scores.gather(-1, ids[1:, None])[:, 0][chosen]
            before = torch.from_numpy(sample.logprobs.numpy()[1:].copy())[chosen]
            name = next(name for name in parts if sample.dataset in name)
            counts[name] += int(chosen.sum())
            ratio = (said - before).clamp(-20, 20).exp()
            if name == "a":
                advantage = float(reward - baseline)
                clipped = ratio.clamp(0.8, 1.2)
                parts[name].append(-torch.minimum(ratio * advantage, clipped * advantage).sum())
            elif name == "bd":
                parts[name].append(-(2.0 if sample.dataset == "b" else 0.5) * said.sum())
            else:
                given = sample.teacher_logprobs
                assert given is not None
                gap = said.detach() - torch.from_numpy(given.numpy()[1:].copy())[chosen]
                weight = ratio.detach().clamp(max=2.0)
                parts[name].append(COEF * (weight * (gap.neg().exp() - 1 + gap + gap * (said - said.detach()))).sum())
    loss = torch.stack([torch.stack(parts[name]).sum() / counts[name] for name in parts]).sum()
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in own.parameters() if p.grad is not None])


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("trainer", [{}, {"micro_batch_tokens": 20}])
def test_the_loss_is_the_sum_of_three_means(model: PreTrainedModel, packed: bool, trainer: dict[str, Any]) -> None:
    groups = labelled({"a": 5, "b": 3, "c": 4, "d": 2})
    want, gradient = plain(model, groups)
    got, result, plan = run(model, groups, packed, **trainer)
    assert abs(result.metrics["loss"] - float(want)) < 1e-6 * max(1.0, abs(float(want)))
    assert float((got - gradient).abs().max()) < 1e-6 * (1 + float(gradient.abs().max()))
    answers = [sample for group in groups for sample, _ in group.samples if sample.dataset in "bd"]
    tokens = sum(sample.loss_mask.data.count(1) for sample in answers)
    assert result.metrics["supervised_tokens"] == tokens
    assert plan.given is not None
    assert plan.given.sum() == len(answers)


@pytest.mark.parametrize("trainer", [{}, {"loss": {"name": "m2po", "args": {"second_moment": 2.0}}}])
def test_given_answers_move_no_metric_of_sampled_tokens(model: PreTrainedModel, trainer: dict[str, Any]) -> None:
    sizes = {"a": 5, "b": 3}
    _, mixed, _ = run(model, labelled(sizes), advantage={"name": "lite_ppo"}, **trainer)
    _, alone, _ = run(model, labelled(sizes)[:1], advantage={"name": "lite_ppo"}, **trainer)
    same = ("tokens", "kl", "ratio_max", "ess", "entropy", "logprob_gap_max", "advantage_std", "masked_fraction")
    for name in [name for name in same if name in alone.metrics]:
        assert mixed.metrics[name] == pytest.approx(alone.metrics[name], rel=1e-5), name
    assert {sample for sample in mixed.samples} == {sample for sample in alone.samples}
    assert mixed.metrics["supervised_loss"] > 0
    assert "supervised_loss" not in alone.metrics


def test_minibatches_of_given_answers_alone_are_updates_too(model: PreTrainedModel) -> None:
    """Each minibatch is a mean of its own, and one without a reward is no division by nothing."""
    groups = labelled({"b": 3, "d": 2})
    got, result, _ = run(model, groups, minibatches=2, batch_groups=2, optimizer={"lr": 1e-9})
    parts = [run(model, [group])[0] for group in groups]
    assert torch.allclose(got, parts[0] + parts[1], atol=1e-6)
    assert result.metrics["tokens"] == 0


def test_a_dataset_has_a_loss_an_advantage_and_a_weight_of_its_own(model: PreTrainedModel) -> None:
    """The gradient is that of a step of each dataset's algorithm alone, by the share of its tokens and its weight."""
    groups = [
        Group(group.task_id, [(msgspec.structs.replace(sample, dataset=name), r) for sample, r in group.samples])
        for group, name in zip(make_groups([5, 4], seed=8), "ae", strict=True)
    ]
    e = {"loss": {"name": "gspo", "args": {"clip_low": 0.5}}, "advantage": {"name": "raw"}}
    terms = [{**TERMS[0], "datasets": ["a", "e"]}, *TERMS[1:]]
    got, result, plan = run(model, groups, terms=terms, datasets={"e": {**e, "weight": 3.0}}, micro_batch_tokens=24)
    one, other = (
        run(model, [groups[0]], terms=terms),
        run(model, [groups[1]], terms=terms, aggregation="token_mean", **e),
    )
    tokens = [sum(row.cut.loss_tokens for row in plan.rows if row.loss == number) for number in (0, 1)]
    want = (tokens[0] * one[0] + 3.0 * tokens[1] * other[0]) / sum(tokens)
    assert torch.allclose(got, want, atol=1e-6)
    assert 0 < result.metrics["clip_fraction"] < 1
    with pytest.raises(ConfigError, match=r"trainer\.datasets\.e\.loss 'decoupled_ppo': a loss with a proximal policy"):
        run(model, groups, terms=terms, datasets={"e": {"loss": {"name": "decoupled_ppo"}}})
    with pytest.raises(ConfigError, match=r"trainer\.datasets\.e\.advantage 'reinforce_pp' compares all tokens"):
        run(model, groups, terms=terms, datasets={"e": {"advantage": {"name": "reinforce_pp"}}})
