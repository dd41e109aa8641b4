"""Losses and their gradients against scalar float64 formulas, token by token, extreme ratios included."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from consumers.trainer.algorithms import LOSSES
from consumers.trainer.algorithms.losses import LossInputs, LossOutput

LIMIT = 20.0

# name: (loss, d loss / d log policy) of one token. p, q: log-probabilities under policy and rollout policy.
Reference = Callable[[float, float, float], tuple[float, float]]


def ratio(p: float, q: float) -> float:
    return math.exp(max(-LIMIT, min(LIMIT, p - q)))


def reinforce(p: float, q: float, a: float) -> tuple[float, float]:
    weight = min(ratio(p, q), 2.0)
    return -a * weight * p, -a * weight


def cispo(p: float, q: float, a: float) -> tuple[float, float]:
    weight = min(ratio(p, q), 1.28)
    return -a * weight * p, -a * weight


def ppo(p: float, q: float, a: float) -> tuple[float, float]:
    r = ratio(p, q)
    slope = r if abs(p - q) <= LIMIT else 0.0
    clipped = min(max(r, 0.8), 1.28)
    loss, gradient = (-a * r, -a * slope) if -a * r >= -a * clipped else (-a * clipped, 0.0)
    if a < 0 and loss > -a * 3.0:
        return -a * 3.0, 0.0
    return loss, gradient


def dppo(p: float, q: float, a: float) -> tuple[float, float]:
    r = ratio(p, q)
    inside = abs(p - q) <= LIMIT
    moved = math.exp(p) - math.exp(q)
    kept = not ((a > 0 and moved > 0.2) or (a < 0 and -moved > 0.2))
    log_r = max(-LIMIT, min(LIMIT, p - q))
    loss = (-r * a if kept else 0.0) + 1e-3 * log_r**2
    gradient = ((-r * a if kept else 0.0) + 2e-3 * log_r) if inside else 0.0
    return loss, gradient


def clipped(low: float, high: float) -> Reference:
    """PPO without the dual clip."""

    def loss(p: float, q: float, a: float) -> tuple[float, float]:
        r = ratio(p, q)
        inner = min(max(r, 1 - low), 1 + high)
        if -a * r >= -a * inner:
            return -a * r, -a * (r if abs(p - q) <= LIMIT else 0.0)
        return -a * inner, 0.0

    return loss


def sapo(p: float, q: float, a: float) -> tuple[float, float]:
    r, tau = ratio(p, q), 1.0 if a > 0 else 1.05
    x = tau * (r - 1)
    sigmoid = 1 / (1 + math.exp(-x)) if x > -700 else 0.0
    slope = -a * 4 * sigmoid * (1 - sigmoid) * (r if abs(p - q) <= LIMIT else 0.0)
    return -a * 4 / tau * sigmoid, slope


REFERENCES: dict[str, Reference] = {
    "reinforce": reinforce,
    "ppo": ppo,
    "dapo": clipped(0.2, 0.28),
    "dr_grpo": clipped(0.2, 0.2),
    "cispo": cispo,
    "dppo": dppo,
    "sapo": sapo,
}
ELSEWHERE = {"decoupled_ppo", "gspo", "m2po"}  # tests/unit/consumers/trainer/algorithms/test_losses_batch.py


def run(
    name: str, p: list[float], q: list[float], a: list[float], mask: list[bool] | None = None
) -> tuple[LossOutput, torch.Tensor]:
    """Loss of one row and the gradient of the sum over its loss tokens, in float64."""
    logprobs = torch.tensor([p], dtype=torch.float64, requires_grad=True)
    chosen = torch.tensor([mask or [True] * len(p)])
    output = LOSSES.get(name)(
        LossInputs(
            logprobs=logprobs,
            rollout_logprobs=torch.tensor([q], dtype=torch.float64),
            advantages=torch.tensor([a], dtype=torch.float64),
            mask=chosen,
        )
    )
    torch.where(chosen, output.loss, 0.0).sum().backward()
    assert logprobs.grad is not None
    return output, logprobs.grad[0]


def test_every_built_in_loss_has_a_reference() -> None:
    assert set(LOSSES.names) == set(REFERENCES) | ELSEWHERE


logprob = st.floats(-60.0, -1e-6)
advantage = st.floats(-4.0, 4.0)


@pytest.mark.parametrize("name", sorted(REFERENCES))
@given(tokens=st.lists(st.tuples(logprob, logprob, advantage), min_size=1, max_size=12))
def test_value_and_gradient(name: str, tokens: list[tuple[float, float, float]]) -> None:
    p, q, a = ([t[i] for t in tokens] for i in range(3))
    output, gradient = run(name, p, q, a)
    for i, token in enumerate(tokens):
        loss, slope = REFERENCES[name](*token)
        assert float(output.loss[0, i].detach()) == pytest.approx(loss, rel=1e-9, abs=1e-12)
        assert float(gradient[i]) == pytest.approx(slope, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_equal_policies_give_the_policy_gradient(name: str) -> None:
    _, gradient = run(name, [-0.5, -2.0], [-0.5, -2.0], [1.5, -0.5])
    assert gradient.tolist() == pytest.approx([-1.5, 0.5])


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_masked_tokens_have_no_gradient_whatever_they_hold(name: str) -> None:
    output, gradient = run(name, [-1.0, -900.0, -1.0], [-1.0, 0.0, -1.0], [1.0, 1e6, 1.0], [True, False, True])
    assert torch.isfinite(output.loss).all()
    assert gradient[1] == 0.0
    assert gradient[0] == gradient[2] == -1.0


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_a_row_without_loss_tokens_is_harmless(name: str) -> None:
    output, gradient = run(name, [-1.0, -2.0], [0.0, 0.0], [3.0, 3.0], [False, False])
    assert torch.isfinite(output.loss).all()
    assert gradient.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", sorted(REFERENCES))
@pytest.mark.parametrize(("p", "q"), [(-1e-4, -1e4), (-1e4, -1e-4)])
@pytest.mark.parametrize("a", [-2.0, 2.0])
def test_extreme_ratios_stay_finite_in_float32(name: str, p: float, q: float, a: float) -> None:
    logprobs = torch.tensor([[p]], requires_grad=True)
    output = LOSSES.get(name)(
        LossInputs(logprobs, torch.tensor([[q]]), torch.tensor([[a]]), torch.ones(1, 1, dtype=torch.bool))
    )
    output.loss.sum().backward()
    assert torch.isfinite(output.loss).all()
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


def test_ppo_reports_what_the_clip_took() -> None:
    output, _ = run("ppo", [-0.5, -0.5, -1.5, -1.5, 2.0], [-1.0, -1.0, -1.0, -1.0, -1.0], [1.0, -1.0, -1.0, 1.0, -1.0])
    assert output.metrics["clipped"][0].tolist() == [True, False, True, False, True]


def test_ppo_without_dual_clip() -> None:
    inputs = LossInputs(*(torch.tensor([[v]]) for v in (2.0, -1.0, -1.0)), torch.ones(1, 1, dtype=torch.bool))
    assert float(LOSSES.get("ppo")(inputs, dual_clip=None).loss) == pytest.approx(math.exp(3.0), rel=1e-6)
    assert float(LOSSES.get("ppo")(inputs).loss) == pytest.approx(3.0)


def test_dppo_masks_by_probability_moved_not_by_ratio() -> None:
    """A rare token may grow by a large factor; a likely one may not move by more than delta."""
    output, _ = run("dppo", [math.log(0.01), math.log(0.9)], [math.log(0.001), math.log(0.6)], [1.0, 1.0])
    assert output.metrics["masked"][0].tolist() == [False, True]


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_gradcheck_where_nothing_is_held_constant(name: str) -> None:
    """reinforce and cispo stop a gradient on purpose: there autograd and differences must differ."""
    values = ([-1.0, -2.0, -0.4], [-1.05, -1.95, -0.5], [0.7, 0.8, -1.1])
    p, q, a = (torch.tensor([v], dtype=torch.float64) for v in values)
    mask = torch.ones(1, 3, dtype=torch.bool)

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        output: LossOutput = LOSSES.get(name)(LossInputs(logprobs, q, a, mask))
        return output.loss

    agrees = torch.autograd.gradcheck(loss, (p.requires_grad_(),), raise_exception=False)
    assert agrees == (name not in {"reinforce", "cispo"})


def test_sapo_gates_softly_where_ppo_clips() -> None:
    output, gradient = run("sapo", [-0.5, 0.5, -1.5], [-0.5, -1.0, -1.0], [1.0, 1.0, -1.0])
    assert output.metrics["gate"][0, 0] == pytest.approx(1.0)
    assert 0 > float(gradient[1]) > -math.exp(1.5)
    assert 0 < float(gradient[2]) < math.exp(-0.5)
