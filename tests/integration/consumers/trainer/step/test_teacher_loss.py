"""Distillation from teachers that are rewards: the loss and the gradient of a step, and of each part of it."""

import asyncio
import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from consumers.reward.scorer import Scorer
from consumers.trainer.data.groups import Group
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.step.build import build_train_step
from consumers.trainer.step.critic import Critic
from consumers.trainer.step.train_step import StepResult, TrainStep, laid_out
from schemas.codec import Array
from schemas.config import RewardConfig, RewardTerm, parse_config
from schemas.messages import Trajectory
from tests.support.models.tiny_model import make_tiny_model, make_tokenizer
from tests.support.trainer.trajectories import make_groups, make_trajectory, random_segments

EXACT = {"name": "exact", "weight": 0.0}
DATASETS = [{"name": "arithmetic", "label": label} for label in ("a", "b", "c")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("teacher"), seed=1, hidden=32, layers=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return load_model(make_tiny_model(tmp_path_factory.mktemp("tiny"), hidden=32, layers=1), "float32")


def make_step(
    model: PreTrainedModel, terms: Sequence[dict[str, Any]], reference: Policy | None = None, **trainer: Any
) -> TrainStep:
    kl = {"coef": 0.7} if reference is not None else {"coef": 0.7, "reference": "teacher"}
    config = parse_config(
        {
            "model": {"path": "in-memory", "dtype": "float32", "max_length": 64},
            "train": DATASETS,
            "reward": {"terms": terms},
            "sampling": {"max_tokens": 8},
            "trainer": {"optimizer": {"lr": 1e-3}, "kl": kl, **trainer},
        }
    )
    critic = Critic(copy.deepcopy(model)) if "critic" in trainer else None
    return build_train_step(config, policy=Policy(copy.deepcopy(model)), reference=reference, critic=critic)


def run(step: TrainStep, groups: Sequence[Group]) -> tuple[Tensor, StepResult]:
    """The step's gradient before clipping, and its result."""
    gradients: list[Tensor] = []

    def look(parameters: object, limit: float) -> float:
        gradients.append(torch.cat([p.grad.flatten() for p in step.policy.parameters() if p.grad is not None]))
        return 0.0

    step.ranks.clip_grad_norm = look  # type: ignore[method-assign, assignment]
    result = step.run(step.planner.plan(groups).batch(), version=5)
    return gradients[0], result


def changed(groups: Sequence[Group], change: Any) -> list[Group]:
    return [Group(g.task_id, [(change(sample), reward) for sample, reward in g.samples]) for g in groups]


def readable(sample: Trajectory) -> Trajectory:
    """The sample with several rows and texts, at a temperature of its own."""
    tokens, seed = sample.tokens.numpy().tolist(), 10 * sample.task_id + sample.sample
    start = sample.loss_mask.data.find(1)
    texts = [make_tokenizer().decode(ids, skip_special_tokens=True) for ids in (tokens[:start], tokens[start:])]
    return msgspec.structs.replace(
        sample,
        prompt=texts[0],
        completion=texts[1],
        segments=random_segments(random.Random(seed), len(tokens)),
        temperature=(0.6, 1.0, 1.5)[seed % 3],
        dataset="a",
    )


def taught(groups: Sequence[Group], folder: Path) -> list[Group]:
    """The samples with what a teacher in its own process says of them."""

    async def score(samples: Sequence[Trajectory]) -> list[Array]:
        term = RewardTerm(name="teacher", args={"model": str(folder), "batch_tokens": 40})
        async with Scorer(RewardConfig(terms=[term], workers=1, timeout_s=60.0), folder) as scorer:
            scores = await scorer.score_all(samples)
        assert {each.status for each in scores} == {"ok"}, scores[0].reason
        return [each.teacher_logprobs for each in scores if each.teacher_logprobs is not None]

    samples = [sample for group in groups for sample, _ in group.samples]
    known = dict(zip(map(id, samples), asyncio.run(score(samples)), strict=True))
    return changed(groups, lambda sample: msgspec.structs.replace(sample, teacher_logprobs=known[id(sample)]))


def teacher(*datasets: str, weight: float = 1.0) -> dict[str, Any]:
    return {"name": "teacher", "weight": weight, "args": {"model": "x"}, "datasets": list(datasets)}


@pytest.mark.parametrize("trainer", [{}, {"micro_batch_tokens": 20, "minibatches": 2, "batch_groups": 2}])
def test_the_loss_is_that_of_a_reference_model(model: PreTrainedModel, folder: Path, trainer: dict[str, Any]) -> None:
    groups = changed([group for group in make_groups([3, 4, 2], seed=5) if group.samples], readable)
    groups = [Group(g.task_id, [each for each in g.samples if 1 in each[0].loss_mask.data]) for g in groups]
    reference = Policy(load_model(folder, "float32")).requires_grad_(False)
    want, held = run(make_step(model, [EXACT], reference, **trainer), groups)
    terms = [EXACT, teacher("a", "b", "c")]
    got, served = run(make_step(model, terms, **trainer), taught(groups, folder))
    assert abs(served.metrics["loss"] - held.metrics["loss"]) < 1e-6
    assert abs(served.metrics["reference_kl"] - held.metrics["reference_kl"]) < 1e-6
    assert float((got - want).abs().max()) < 1e-6 * (1 + float(want.abs().max()))
    assert held.metrics["reference_kl"] > 0.01


def test_the_gradient_is_the_enumerated_reverse_kl(model: PreTrainedModel, folder: Path) -> None:
    """One sample of each token, drawn evenly: the step's mean is the sum over the vocabulary."""
    student, prompt = copy.deepcopy(model), [5, 9, 14]
    with torch.no_grad():
        # Nearly even, so that no weight of policy / rollout policy is at its bound.
        student.get_output_embeddings().weight.mul_(0.02)
    ids = torch.tensor([prompt])
    size = student.config.vocab_size
    with torch.no_grad():
        wise = torch.log_softmax(load_model(folder, "float32")(ids).logits[0, -1], -1)
    samples = []
    for token in range(size):
        made = make_trajectory(0, token, 3, 1, 4, logprobs=[-float(np.log(size))])
        tokens, given = Array.of([*prompt, token], "i4"), Array.of([0.0, 0.0, 0.0, float(wise[token])], "f4")
        samples.append((msgspec.structs.replace(made, tokens=tokens, dataset="a", teacher_logprobs=given), 0.0))
    settings = {"kl": {"coef": 1.0, "reference": "teacher"}, "advantage": {"name": "raw"}, "batch_groups": 1}
    got, result = run(make_step(student, [teacher("a"), EXACT], **settings), [Group(0, samples)])
    own = torch.log_softmax(student(ids).logits[0, -1], -1)
    divergence = (own.exp() * (own - wise)).sum()
    divergence.backward()
    want = torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None])
    assert float((got - want).abs().max()) < 1e-6 * float(want.abs().max() + 1)
    assert float(want.abs().max()) > 1e-3
    assert result.metrics["loss"] == pytest.approx(divergence.item(), rel=1e-4)


def test_each_part_is_a_mean_over_its_own_samples(model: PreTrainedModel) -> None:
    """Dataset a is distilled, b is rewarded, c is both; its teacher has three times the weight."""
    groups = make_groups([4, 4, 4], seed=8)
    for group, dataset in zip(groups, "abc", strict=True):
        generator = np.random.default_rng(group.task_id)

        def given(sample: Trajectory, dataset: str = dataset, generator: Any = generator) -> Trajectory:
            says = Array.of(-generator.uniform(0.1, 3.0, len(sample.tokens)), "f4") if dataset != "b" else None
            return msgspec.structs.replace(sample, dataset=dataset, teacher_logprobs=says)

        group.samples[:] = changed([group], given)[0].samples  # type: ignore[index]
    terms = [{"name": "exact", "datasets": ["b", "c"]}, teacher("a"), teacher("c", weight=3.0)]
    together, result = run(make_step(model, terms, advantage={"name": "raw"}, micro_batch_tokens=30), groups)
    tokens = [sum(sample.loss_mask.data.count(1) for sample, _ in group.samples) for group in groups]
    rewards, _ = run(make_step(model, [EXACT, teacher("a")], advantage={"name": "raw"}), groups[1:])
    parts = [rewards]
    for place, weight in ((0, 1.0), (2, 3.0)):
        bare = changed([groups[place]], lambda sample: msgspec.structs.replace(sample, dataset="a"))
        alone, _ = run(make_step(model, [teacher("a"), {"name": "exact", "datasets": ["b", "c"]}]), bare)
        parts.append(weight * alone * tokens[place] / (tokens[0] + tokens[2]))
    assert torch.allclose(together, sum(parts, torch.zeros_like(together)), rtol=1e-4, atol=1e-6)
    assert result.metrics["taught_fraction"] == pytest.approx((tokens[0] + tokens[2]) / sum(tokens))


@pytest.mark.parametrize(
    "trainer",
    [
        {"advantage": {"name": "centered", "normalise": True}},
        {"advantage": {"name": "reinforce_pp"}},
        {"advantage": {"name": "gae"}, "critic": {"optimizer": {"lr": 1e-3}}},
    ],
    ids=["normalise", "reinforce_pp", "gae"],
)
def test_samples_without_a_reward_change_no_credit_of_others(model: PreTrainedModel, trainer: dict[str, Any]) -> None:
    """Neither their advantages nor what the critic learns."""
    groups = make_groups([4, 4, 4], seed=8)
    rewarded = changed(groups[:1], lambda sample: msgspec.structs.replace(sample, dataset="b"))

    def distilled(sample: Trajectory) -> Trajectory:
        says = Array.of([-1.0] * len(sample.tokens), "f4")
        return msgspec.structs.replace(sample, dataset="a", teacher_logprobs=says)

    advantages, critics = [], []
    for batch in (rewarded, [*rewarded, *changed(groups[1:], distilled)]):
        step = make_step(model, [{"name": "exact", "datasets": ["b", "c"]}, teacher("a")], **trainer)
        assert step.preparation is not None
        planned = step.planner.plan(batch).batch()
        micros = [laid_out(micro, step.policy) for micro in planned.micro_batches]
        found = step.preparation.run(step.policy, micros, 5, step.ranks.all_reduce_sum)
        of_first = [micro.advantages[micro.mask & (micro.group == 0)[:, None]] for micro in found]
        advantages.append(torch.cat(of_first).sort().values)
        metrics = step.run(planned, version=5).metrics
        critics.append([value for name, value in metrics.items() if name.startswith("critic_")])
    assert float(advantages[0].abs().max()) > 0.1
    assert torch.allclose(advantages[0], advantages[1], atol=1e-5)
    assert critics[0] == pytest.approx(critics[1], rel=1e-4)
