"""KL estimators and their gradients in expectation, by summing over a whole vocabulary; rejection rules by hand."""

import math

import pytest
import torch
from torch import Tensor

from consumers.trainer.algorithms import KL_ESTIMATORS
from consumers.trainer.algorithms.kl import kl_loss, kl_reward
from consumers.trainer.algorithms.objective import Rule, reject
from consumers.trainer.algorithms.sequences import Sequences
from schemas.config import RejectionConfig

VOCABULARY = 7
NAMES = ["k1", "k2", "k3"]


def distributions() -> tuple[Tensor, Tensor, Tensor]:
    """Logits of policy, reference and rollout policy, float64; the rollout policy is near the policy."""
    generator = torch.Generator().manual_seed(3)
    policy, reference, noise = torch.randn(3, VOCABULARY, generator=generator, dtype=torch.float64).unbind()
    return policy, reference, policy + 0.1 * noise


def exact_gradient(policy: Tensor, reference: Tensor) -> Tensor:
    """Of KL(policy || reference) by the policy's logits."""
    logits = policy.clone().requires_grad_()
    p = torch.log_softmax(logits, -1)
    (p.exp() * (p - torch.log_softmax(reference, -1))).sum().backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("off_policy", [False, True])
def test_expected_gradient_in_the_loss_is_that_of_the_kl(name: str, off_policy: bool) -> None:
    """The expectation over tokens of the rollout policy, summed over the vocabulary."""
    policy, reference, rollout = distributions()
    rollout = rollout if off_policy else policy
    logits = policy.clone().requires_grad_()
    every, mask = torch.log_softmax(logits, -1)[None], torch.ones(1, VOCABULARY, dtype=torch.bool)
    q = torch.log_softmax(rollout, -1)[None]
    penalty = kl_loss(KL_ESTIMATORS.get(name), every, torch.log_softmax(reference, -1)[None], q, mask)
    (q.exp() * penalty).sum().backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx(exact_gradient(policy, reference).tolist(), abs=1e-12)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(name: str) -> None:
    policy, reference, _ = distributions()
    p, ref = torch.log_softmax(policy, -1), torch.log_softmax(reference, -1)
    want = (p.exp() * (p - ref)).sum()
    got = (p.exp() * KL_ESTIMATORS.get(name)(p - ref)).sum()
    assert float(got) == pytest.approx(float(want), abs=1e-12)


def test_values_are_of_the_policy_over_the_reference_and_not_reversed() -> None:
    """log p = -1, log reference = -3: k1 is 2. Swapped arguments give -2 elsewhere."""
    p, ref, mask = torch.tensor([[-1.0, 5.0]]), torch.tensor([[-3.0, -9.0]]), torch.tensor([[True, False]])
    values = {name: kl_reward(KL_ESTIMATORS.get(name), p, ref, mask)[0].tolist() for name in NAMES}
    assert values["k1"] == pytest.approx([2.0, 0.0])
    assert values["k2"] == pytest.approx([2.0, 0.0])
    assert values["k3"] == pytest.approx([math.exp(-2) - 1 + 2, 0.0])


@pytest.mark.parametrize("name", NAMES)
def test_own_derivatives_are_not_the_gradient(name: str) -> None:
    """Why kl_loss has a gradient of its own: k1's vanishes on average, k3's is that of the reversed KL."""
    policy, reference, _ = distributions()
    logits = policy.clone().requires_grad_()
    p, ref = torch.log_softmax(logits, -1), torch.log_softmax(reference, -1)
    (p.detach().exp() * KL_ESTIMATORS.get(name)(p - ref)).sum().backward()
    assert logits.grad is not None
    exact = exact_gradient(policy, reference)
    reverse = policy.clone().requires_grad_()
    (ref.exp() * (ref - torch.log_softmax(reverse, -1))).sum().backward()
    want = {"k1": torch.zeros(VOCABULARY), "k2": exact, "k3": reverse.grad}[name]
    assert want is not None
    assert logits.grad.tolist() == pytest.approx(want.tolist(), abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_extreme_gaps_and_masked_tokens_stay_finite(name: str) -> None:
    p = torch.tensor([[-1e-4, -1e4, -1.0]], requires_grad=True)
    ref, mask = torch.tensor([[-1e4, -1e-4, -math.inf]]), torch.tensor([[True, True, False]])
    penalty = kl_loss(KL_ESTIMATORS.get(name), p, ref, p.detach(), mask)
    torch.where(mask, penalty, 0.0).sum().backward()
    assert torch.isfinite(penalty).all()
    assert p.grad is not None
    assert torch.isfinite(p.grad).all()
    assert p.grad[0, 2] == 0


ROWS = [[0.5, -0.5, 0.1], [1.2, 0.9], [0.0]]  # log(policy / rollout policy)


def factors(**rule: object) -> tuple[list[float], list[bool]]:
    mask = torch.tensor([[i < len(row) for i in range(4)] for row in ROWS])
    log_ratio = torch.tensor([[*row, *[0.0] * (4 - len(row))] for row in ROWS], dtype=torch.float64)
    rules = [Rule.of(RejectionConfig.model_validate(rule))]
    factor, rejected = reject(rules, log_ratio, Sequences(None, mask))
    return factor[mask].tolist(), rejected[mask].tolist()


def flat(values: list[list[float]]) -> list[float]:
    return [v for row in values for v in row]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("action", ["mask", "clamp"])
def test_ratio_rules(level: str, action: str) -> None:
    lower, upper = 0.8, 1.5
    want = []
    for row in ROWS:
        means = [sum(row) / len(row)] * len(row) if level == "sequence" else row
        for log_r in means:
            r = math.exp(log_r)
            bounded = min(max(r, lower), upper)
            want.append(bounded / r if action == "clamp" else float(r == bounded))
    got, rejected = factors(level=level, action=action, lower=lower, upper=upper)
    assert got == pytest.approx(want)
    assert rejected == [w == 0 for w in want]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("measure", NAMES)
def test_kl_rules(level: str, measure: str) -> None:
    """The divergence of the rollout policy from the policy: d = log(rollout policy / policy)."""
    estimate = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}[measure]
    want = []
    for row in ROWS:
        values = [estimate(-log_r) for log_r in row]
        values = [sum(values) / len(values)] * len(values) if level == "sequence" else values
        want += [float(v <= 0.12) for v in values]
    assert factors(measure=measure, level=level, upper=0.12)[0] == want


def test_a_clamped_ratio_counts_as_its_bound() -> None:
    """The policy gradient r * A * grad log policy becomes 1.5 * A * grad log policy."""
    (got, *_), _ = factors(action="clamp", upper=1.5)
    assert got * math.exp(0.5) == pytest.approx(1.5)


def test_several_rules_multiply() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    rules = [
        Rule.of(RejectionConfig(action="clamp", upper=2.0)),
        Rule.of(RejectionConfig(measure="k3", upper=2.0)),
    ]
    factor, rejected = reject(rules, torch.tensor([[math.log(4.0), math.log(20.0)]]), Sequences(None, mask))
    assert factor[0].tolist() == pytest.approx([0.5, 0.0])
    assert rejected[0].tolist() == [False, True]


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ({}, "must have lower or upper"),
        ({"lower": 2.0, "upper": 1.0}, "above upper"),
        ({"measure": "k3", "action": "clamp", "upper": 1.0}, "use action mask"),
        ({"action": "clamp", "upper": 0.0}, "above 0"),
    ],
)
def test_rules_that_make_no_sense_are_refused(rule: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RejectionConfig.model_validate(rule)
