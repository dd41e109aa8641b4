"""Losses on preference pairs against their formulas in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from consumers.offline.pairs import bradley_terry_loss, dpo_loss, ipo_loss, preference_margin

MARGINS = [-800.0, -3.0, -0.2, 0.0, 0.7, 5.0, 800.0]


def softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def test_margin_is_relative_to_the_reference_and_to_the_rejected_answer() -> None:
    values = [torch.tensor([v]) for v in (-4.0, -9.0, -5.0, -7.0)]
    assert preference_margin(*values).tolist() == [1.0 - (-2.0)]


@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_values(beta: float) -> None:
    margins = torch.tensor(MARGINS, dtype=torch.float64)
    assert dpo_loss(margins, beta).tolist() == pytest.approx([softplus(-beta * h) for h in MARGINS])
    assert ipo_loss(margins, beta).tolist() == pytest.approx([(h - 1 / (2 * beta)) ** 2 for h in MARGINS])
    zero = torch.zeros_like(margins)
    assert bradley_terry_loss(margins, zero).tolist() == pytest.approx([softplus(-h) for h in MARGINS])


def test_gradcheck() -> None:
    margins = torch.tensor([-3.0, -0.2, 0.7, 5.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda h: dpo_loss(h, 0.3), (margins,))
    assert torch.autograd.gradcheck(lambda h: ipo_loss(h, 0.3), (margins,))
    assert torch.autograd.gradcheck(lambda h: bradley_terry_loss(h, 0.5 * h), (margins,))
