"""Training in float16: the loss is scaled, so that small gradients do not vanish in a type of few exponents."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from consumers.trainer.checkpoint.store import CheckpointStore
from consumers.trainer.step.build import build_train_step
from consumers.trainer.step.gradient_update import GradientUpdate, LossScale
from consumers.trainer.step.train_step import TrainStep
from tests.support.configurations import minimal_config
from tests.support.trainer.trajectories import make_groups

HUGE = 1 << 16
"""Longest completion, by which the aggregation ``constant`` divides: gradients are as small as in a large step."""


def make_step(model: Path, dtype: str, **trainer: Any) -> TrainStep:
    return build_train_step(
        minimal_config(
            model={"path": str(model), "dtype": dtype, "max_length": 2 * HUGE},
            sampling={"max_tokens": HUGE},
            trainer={"aggregation": "constant", "loss": {"name": "reinforce"}, **trainer},
        )
    )


def train(step: TrainStep) -> tuple[Tensor, dict[str, float]]:
    """One step: the gradient that the optimizer got, and the step's figures."""
    seen: list[Tensor] = []

    def look(*_: Any) -> None:
        gradients = [p.grad for p in step.policy.parameters() if p.grad is not None]
        seen.append(torch.cat([(g.to_local() if isinstance(g, DTensor) else g).flatten() for g in gradients]).clone())

    handle = step.update.optimizer.register_step_pre_hook(look)
    result = step.run(step.planner.plan(make_groups([4, 4], seed=1)).batch(), version=5)
    handle.remove()
    return (seen[0] if seen else torch.zeros(0)), result.metrics


def scale_of(update: GradientUpdate) -> LossScale:
    assert update.loss_scale is not None
    return update.loss_scale


def test_small_gradients_are_those_of_float32(model: Path) -> None:
    (want, exact), (got, found) = (train(make_step(model, dtype)) for dtype in ("float32", "float16"))
    assert float(torch.cosine_similarity(want, got, dim=0)) > 0.999
    assert found["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.02)
    assert float((got == 0).float().mean()) < float((want == 0).float().mean()) + 0.02


def test_a_scale_at_which_gradients_overflow_is_lowered_within_the_step(model: Path) -> None:
    step = make_step(model, "float16", aggregation="token_mean")
    scale_of(step.update).value = 2.0**40
    got, found = train(step)
    want, _ = train(make_step(model, "float32", aggregation="token_mean"))
    assert found["skipped"] == 0.0
    assert scale_of(step.update).value < 2.0**40
    assert found["loss_scale"] == scale_of(step.update).value
    assert float(torch.cosine_similarity(want, got, dim=0)) > 0.999
    assert found["samples"] == 8, "what was computed before is not counted"


def test_a_gradient_broken_at_any_scale_only_skips_the_step(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(model, "float16")
    before, backward = scale_of(step.update).value, step.ranks.backward
    monkeypatch.setattr(step.ranks, "backward", lambda loss: backward(loss * float("nan")))
    _, found = train(step)
    assert found["skipped"] == 1.0
    assert scale_of(step.update).value == before


def test_the_scale_grows_again_after_steps_without_overflow(model: Path) -> None:
    step = make_step(model, "float16")
    scale_of(step.update).value, scale_of(step.update).interval = 64.0, 2
    for _ in range(2):
        train(step)
    assert scale_of(step.update).value == 128.0


def test_a_critic_has_a_scale_of_its_own(model: Path) -> None:
    step = make_step(model, "float16", advantage={"name": "gae"}, critic={})
    assert step.critic is not None
    scale_of(step.critic.update).value = 2.0**40
    _, found = train(step)
    assert found["critic_grad_norm"] < float("inf")
    assert found["critic_loss_scale"] == scale_of(step.critic.update).value < 2.0**40


def test_a_checkpoint_keeps_the_scale(model: Path, tmp_path: Path) -> None:
    step, store = make_step(model, "float16"), CheckpointStore(tmp_path)
    scale_of(step.update).value, scale_of(step.update).steps = 256.0, 7
    path = store.save(step, step=1, version=1, leader_term=1, extra={})
    other = make_step(model, "float16")
    store.load(path, other)
    assert (scale_of(other.update).value, scale_of(other.update).steps) == (256.0, 7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_types_need_no_scale(model: Path, dtype: str) -> None:
    _, found = train(make_step(model, dtype))
    assert "loss_scale" not in found
