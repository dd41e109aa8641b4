"""Aggregation of token losses to one number: a weight for every sequence, so micro-batching can't change it.

The step's loss is the sum over loss tokens of ``weight of the sequence * token loss``. The
denominators count the whole optimizer step, all micro-batches and ranks, before any rejection
mask: a token that a loss masks or clips still counts. Groups are never split over ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Totals:
    """Counts over the whole step, all micro-batches and ranks: loss tokens, sequences, prompt groups.

    Sequences without a loss token, and groups of such ones, are not counted: a mean is over what there is, and a
    sample of which nothing was generated must not shrink the others' part. max_tokens: longest completion that
    sampling allows, the constant of ``constant``.
    """

    tokens: int
    sequences: int
    groups: int
    max_tokens: int

    @classmethod
    def of(cls, lengths: npt.NDArray[np.int64], groups: npt.NDArray[np.int64], max_tokens: int) -> Self:
        """Count a step. lengths: loss tokens of each sequence; groups: index of its group; int64 [S]."""
        there = lengths > 0
        return cls(int(lengths.sum()), int(there.sum()), len(np.unique(groups[there])), max_tokens)


Weights: TypeAlias = npt.NDArray[np.float64]
Aggregation: TypeAlias = Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64], Totals], Weights]


def token_mean(lengths: npt.NDArray[np.int64], groups: npt.NDArray[np.int64], totals: Totals) -> Weights:
    """1/N at every loss token, N the loss tokens of the step (DAPO). lengths, groups: int64 [S]."""
    return np.full(len(lengths), 1.0 / max(totals.tokens, 1))


def sequence_mean(lengths: npt.NDArray[np.int64], groups: npt.NDArray[np.int64], totals: Totals) -> Weights:
    """Mean over sequences of the mean over a sequence's tokens (GRPO): short answers weigh more by token."""
    return 1.0 / (np.maximum(lengths, 1) * max(totals.sequences, 1))


def prompt_mean(lengths: npt.NDArray[np.int64], groups: npt.NDArray[np.int64], totals: Totals) -> Weights:
    """Mean over prompt groups of the mean over a group's tokens."""
    if not len(lengths):
        return np.zeros(0)
    _, index = np.unique(groups, return_inverse=True)
    tokens = np.bincount(index, weights=lengths)[index]
    return 1.0 / (np.maximum(tokens, 1) * max(totals.groups, 1))


def constant(lengths: npt.NDArray[np.int64], groups: npt.NDArray[np.int64], totals: Totals) -> Weights:
    """Sum over tokens, divided by sequences times ``max_tokens``: no length in it (Dr. GRPO, arXiv:2503.20783)."""
    return np.full(len(lengths), 1.0 / (max(totals.sequences, 1) * max(totals.max_tokens, 1)))
