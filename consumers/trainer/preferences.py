"""Losses on pairs of answers of which one is preferred: pure functions, one value for each pair."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def preference_margin(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> Tensor:
    """h = log(policy/reference) of the chosen answer minus that of the rejected one, [P].

    Each input is [P]: sums of log-probabilities over the tokens of an answer.
    """
    return (chosen - ref_chosen) - (rejected - ref_rejected)


def dpo_loss(margin: Tensor, beta: float) -> Tensor:
    """-log sigmoid(beta * h), [P] (DPO, arXiv:2305.18290)."""
    return -F.logsigmoid(beta * margin)


def ipo_loss(margin: Tensor, beta: float) -> Tensor:
    """(h - 1/(2*beta))^2, [P]: bounded preference, so certain pairs don't drive it on (IPO, arXiv:2310.12036)."""
    return (margin - 1 / (2 * beta)).square()


def bradley_terry_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log sigmoid(score of the chosen answer - score of the rejected one), [P] (Bradley and Terry 1952)."""
    return -F.logsigmoid(chosen - rejected)
