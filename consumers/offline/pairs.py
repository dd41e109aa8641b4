"""Preference pairs, a prompt with a better and a worse answer: their tokens, their batches, and the losses on them.

The losses are pure functions with a value for each pair, [P].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from schemas.errors import DataError

T = TypeVar("T")
PairIds: TypeAlias = tuple[list[int], list[int], list[int]]
"""Token ids of the prompt, of the better and of the worse answer."""


@dataclass(frozen=True)
class Preference:
    """A prompt with the better (chosen) and the worse (rejected) answer, as texts."""

    prompt: str
    chosen: str
    rejected: str


def encode(tokenizer: Any, pair: Preference, max_length: int) -> PairIds:
    """Token ids of a pair, both answers with the end of sequence.

    DataError if the prompt is empty, or prompt and answer have more than ``max_length`` tokens.
    """
    prompt, chosen, rejected = (
        list(tokenizer(text, add_special_tokens=False).input_ids) for text in (pair.prompt, pair.chosen, pair.rejected)
    )
    if not prompt:
        raise DataError(f"preference {pair!r} has an empty prompt")
    answers = [*chosen, tokenizer.eos_token_id], [*rejected, tokenizer.eos_token_id]
    longest = len(prompt) + max(map(len, answers))
    if longest > max_length:
        raise DataError(
            f"the preference of prompt {pair.prompt[:40]!r} has {longest} tokens, model.max_length {max_length}"
        )
    return prompt, *answers


def padded(rows: Sequence[list[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pad rows of token ids on the right with ``pad``: ids int64 [R, T], and lengths int64 [R]."""
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.full((len(rows), int(lengths.max())), pad, dtype=torch.int64)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row)
    return tokens.to(device), lengths.to(device)


def batches(rows: Sequence[T], size: int, seed: int) -> Iterator[list[T]]:
    """Yield batches without end, every epoch in a new order; the last batch of an epoch may be smaller."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(rows), generator=generator).tolist()
        for start in range(0, len(order), size):
            yield [rows[i] for i in order[start : start + size]]


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
