"""On-policy distillation: a run without rewards whose reference is the teacher brings the student to it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from consumers.trainer.data.groups import Group
from consumers.trainer.model.policy import Policy, load_model
from tests.support.models.tiny_model import make_tiny_model
from tests.support.trainer.train_steps import make_train_step
from tests.support.trainer.trajectories import make_trajectory

pytestmark = pytest.mark.integration

PROMPT = [5, 9, 14]
SAMPLES, LENGTH = 48, 3


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
