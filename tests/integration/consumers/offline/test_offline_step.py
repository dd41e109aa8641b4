"""The optimizer step of training without generators: small forward passes, the same gradient, nothing broken."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from consumers.offline.encoding import Encoded
from consumers.offline.loop import MOST_SKIPPED, MemoryLimits, MicroBatches, OfflineStep, answer_logprobs
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.model.policy import Policy, load_model
from schemas.errors import ConfigError
from tests.support.models.tiny_model import make_tiny_model

pytestmark = pytest.mark.integration

ROWS: list[Encoded] = [([1, *range(10, 12 + a)], list(range(20, 22 + a % 5))) for a in range(12)]


def tokens(row: Encoded) -> int:
    return len(row[0]) + len(row[1])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", hidden=32, layers=2)


def build(path: Path, packed: bool = True, **limits: Any) -> tuple[Policy, OfflineStep[Encoded]]:
    policy, ranks, found = Policy(load_model(path, "float32")), Ranks(), MemoryLimits(**limits)
    policy.packed = packed
    found.apply(policy.causal_lm)
    # Plain descent, so that weights differ as gradients do.
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    cut = MicroBatches(ranks, tokens, found, packed)
    return policy, OfflineStep(policy, optimizer, cut, ranks, torch.float32, max_grad_norm=1e9)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_a_step_in_micro_batches_changes_the_weights_like_one_in_a_piece(path: Path, packed: bool) -> None:
    changed = []
    for limits in ({}, {"micro_batch_tokens": 40, "activation_checkpointing": True}):
        policy, step = build(path, packed, **limits)
        seen: list[int] = []

        def loss(rows: Sequence[Encoded], policy: Policy = policy, seen: list[int] = seen) -> Tensor:
            longest = max(map(tokens, rows))
            seen.append(sum(map(tokens, rows)) if packed else longest * len(rows))
            return -answer_logprobs(policy, rows).sum() / 40

        assert step.run(ROWS, loss, lr=1.0) is not None
        changed.append((torch.cat([p.detach().flatten() for p in policy.parameters()]), seen))
    (whole, one), (cut, several) = changed
    assert len(one) <= 2
    assert len(several) > 3
    assert max(several) <= 40
    assert torch.allclose(whole, cut, atol=1e-5)


def test_logprobs_of_answers_are_those_of_the_whole_distribution(path: Path) -> None:
    policy, _ = build(path)
    policy.requires_grad_(False)
    sums = answer_logprobs(policy, ROWS[:3])
    for (prompt, answer), found in zip(ROWS[:3], sums.tolist(), strict=True):
        logits = policy.causal_lm(input_ids=torch.tensor([prompt + answer])).logits[0].float().log_softmax(-1)
        by_hand = sum(float(logits[len(prompt) - 1 + k, token]) for k, token in enumerate(answer))
        assert found == pytest.approx(by_hand, rel=1e-4)


def test_a_step_that_is_not_finite_changes_nothing_and_several_end_the_training(path: Path) -> None:
    policy, step = build(path)
    before = [p.detach().clone() for p in policy.parameters()]

    def broken(rows: Sequence[Encoded]) -> Tensor:
        return answer_logprobs(policy, rows).sum() * float("nan")

    def good(rows: Sequence[Encoded]) -> Tensor:
        return -answer_logprobs(policy, rows).sum() / 40

    assert step.run(ROWS, broken, lr=1.0) is None
    assert all(torch.equal(was, now) for was, now in zip(before, policy.parameters(), strict=True))
    assert step.run(ROWS, good, lr=1.0) is not None
    assert not all(torch.equal(was, now) for was, now in zip(before, policy.parameters(), strict=True))
    for _ in range(MOST_SKIPPED - 1):
        assert step.run(ROWS, broken, lr=1.0) is None
    with pytest.raises(ConfigError, match=f"{MOST_SKIPPED} steps in a row"):
        step.run(ROWS, broken, lr=1.0)
