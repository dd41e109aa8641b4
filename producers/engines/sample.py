"""Sampling from logits, with the log-probability each token was sampled with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draw:
    """How one row is sampled. temperature 0 is greedy. generator: the row's own, or torch's global one."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    generator: torch.Generator | None = None


def draw(logits: Tensor, rows: Sequence[Draw]) -> tuple[list[int], list[float]]:
    """One token for each row of logits float32 [B, V].

    Returns ids [B] and natural log-probabilities [B] of the distribution sampled from: after
    temperature, top_k and top_p, renormalised. A greedy row's are those at temperature 1.
    """
    scale = torch.tensor([row.temperature or 1.0 for row in rows], device=logits.device)
    logprobs = truncate(torch.log_softmax(logits / scale[:, None], dim=-1), rows)
    probabilities = logprobs.exp()
    tokens = torch.multinomial(probabilities, 1)
    for index, row in enumerate(rows):
        if row.temperature == 0:
            tokens[index] = logprobs[index].argmax()
        elif row.generator is not None:
            tokens[index] = torch.multinomial(probabilities[index].cpu(), 1, generator=row.generator)
    return tokens[:, 0].tolist(), logprobs.gather(1, tokens)[:, 0].tolist()


def truncate(logprobs: Tensor, rows: Sequence[Draw]) -> Tensor:
    """Apply top_k, then top_p (the smallest set of likeliest tokens that reaches it), and renormalise. [B, V]"""
    if all(row.top_p >= 1 and row.top_k <= 0 for row in rows):
        return logprobs
    size = logprobs.shape[1]
    ordered, order = logprobs.sort(dim=-1, descending=True)
    k = torch.tensor([row.top_k if row.top_k > 0 else size for row in rows], device=logprobs.device)
    p = torch.tensor([row.top_p for row in rows], device=logprobs.device)
    ordered = ordered.masked_fill(torch.arange(size, device=logprobs.device) >= k[:, None], -torch.inf)
    ordered = torch.log_softmax(ordered, dim=-1)
    before = ordered.exp().cumsum(dim=-1) - ordered.exp()
    # A row without top_p keeps its tail: rounding can bring the sum to 1 before the last token.
    ordered = ordered.masked_fill((before >= p[:, None]) & (p[:, None] < 1), -torch.inf)
    return torch.log_softmax(torch.full_like(logprobs, -torch.inf).scatter(1, order, ordered), dim=-1)
