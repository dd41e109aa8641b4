"""Continuous batching over a Hugging Face model: rows join many at a time, step together, and leave when they are done.

Each step samples one token a row from its logits, with the log-probability that it was sampled with. Rows are
left-padded to one length: joining pads the shorter cache, leaving drops rows and the columns that only they needed.
All of it runs in the engine's thread. Shapes: B rows in flight, T positions, V vocabulary, G generated tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from schemas.messages import FinishReason, Span

PREFILL = 16384
"""Tokens, with padding, of the prompts that are prefilled together."""


@dataclass(frozen=True)
class Draw:
    """How one row is sampled. temperature 0 is greedy. generator: the row's own, or torch's global one."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    generator: torch.Generator | None = None


def draw(logits: Tensor, rows: Sequence[Draw]) -> tuple[list[int], list[float]]:
    """Sample one token for each row of logits float32 [B, V].

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


@dataclass
class Row:
    """A sample that is being generated. ``finish`` is None while it runs; ``prompt``: what it joined with."""

    draw: Draw
    max_tokens: int
    stop: Sequence[str] = ()
    prompt: Sequence[int] = ()
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: FinishReason | None = None

    def spans(self) -> list[Span]:
        """Weight versions as spans over [0, G)."""
        spans: list[Span] = []
        for at, version in enumerate(self.versions):
            if spans and spans[-1].version == version:
                spans[-1] = Span(version, spans[-1].start, at + 1)
            else:
                spans.append(Span(version, at, at + 1))
        return spans


class ContinuousBatch:
    """The rows in flight, B of them over T positions, with their keys and values.

    eos: ids that end a row. decode: tokens to text, for stop strings.
    """

    def __init__(self, model: PreTrainedModel, eos: set[int], decode: Callable[[list[int]], str]) -> None:
        self._model = model
        self._eos = eos
        self._decode = decode
        self._cache: list[tuple[Tensor, Tensor]] = []  # each [B, heads, T, head]
        self._mask = torch.zeros(0, 0, dtype=torch.long, device=model.device)  # [B, T], 1 where there is a token
        self.rows: list[Row] = []

    def join(self, requests: Sequence[tuple[Sequence[int], list[Row]]], version: int) -> None:
        """Add the rows of requests, each a prompt and the rows that share it, and sample the first token of each.

        Prompts are prefilled many at a time, those of like length together.
        """
        for wave in _waves(sorted(requests, key=lambda request: len(request[0]))):
            self._join(wave, version)
        self.drop_finished()

    def _join(self, wave: Sequence[tuple[Sequence[int], list[Row]]], version: int) -> None:
        ids, mask = _padded([prompt for prompt, _ in wave], self._model.device)
        logits, fresh = self._forward(ids, mask, (mask.cumsum(dim=1) - 1).clamp(min=0), [])
        counts = torch.tensor([len(rows) for _, rows in wave], device=ids.device)
        if int(counts.max()) > 1:
            mask, logits = mask.repeat_interleave(counts, 0), logits.repeat_interleave(counts, 0)
            fresh = [(keys.repeat_interleave(counts, 0), values.repeat_interleave(counts, 0)) for keys, values in fresh]
        if self.rows:
            width = max(mask.shape[1], self._mask.shape[1])
            fresh = [
                (_stack(old[0], new[0], width), _stack(old[1], new[1], width))
                for old, new in zip(self._cache, fresh, strict=True)
            ]
            mask = torch.cat([_left(self._mask, width, 1), _left(mask, width, 1)])
        self._cache, self._mask = fresh, mask
        joined = [row for _, rows in wave for row in rows]
        for prompt, rows in wave:
            for row in rows:
                row.prompt = prompt
        self.rows += joined
        self._sample(joined, logits, version)

    def step(self, version: int) -> None:
        """Sample one more token for every row."""
        last = torch.tensor([[row.tokens[-1]] for row in self.rows], device=self._model.device)
        positions = self._mask.sum(dim=1, keepdim=True)
        self._mask = torch.cat([self._mask, torch.ones_like(last)], dim=1)
        logits, self._cache = self._forward(last, self._mask, positions, self._cache)
        self._sample(self.rows, logits, version)
        self.drop_finished()

    def recompute(self) -> None:
        """Make keys and values of every row anew, by the weights as they are now."""
        if not self.rows:
            return
        texts = [[*row.prompt, *row.tokens[:-1]] for row in self.rows]  # the last token is the next step's input
        ids, mask = _padded(texts, self._model.device)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        _, self._cache = self._forward(ids, mask, positions, [])
        self._mask = mask

    def clear(self) -> None:
        """Drop every row."""
        self.rows, self._cache, self._mask = [], [], self._mask[:0, :0]

    @torch.no_grad()
    def _forward(
        self, ids: Tensor, mask: Tensor, positions: Tensor, cache: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Logits of the last position float32 [B, V], and the grown cache."""
        past = DynamicCache(cache) if cache else DynamicCache()
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=past,
            use_cache=True,
            logits_to_keep=1,
        )
        grown = [(layer.keys, layer.values) for layer in past.layers]  # type: ignore[union-attr]
        return output.logits[:, -1].float(), grown  # type: ignore[return-value]

    def _sample(self, rows: list[Row], logits: Tensor, version: int) -> None:
        tokens, logprobs = draw(logits, [row.draw for row in rows])
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.versions.append(version)
            if token in self._eos or (row.stop and self._stopped(row)):
                row.finish = "stop"
            elif len(row.tokens) >= row.max_tokens:
                row.finish = "length"

    def _stopped(self, row: Row) -> bool:
        # A stop string ends in the newest token, so a tail is enough; 8 more for tokens without text of their own.
        tail = row.tokens[-(max(map(len, row.stop)) + 8) :]
        text = self._decode(tail)
        return any(stop in text for stop in row.stop)

    def drop_finished(self) -> None:
        """Let finished rows leave."""
        keep = [index for index, row in enumerate(self.rows) if row.finish is None]
        if len(keep) == len(self.rows):
            return
        if not keep:
            self.clear()
            return
        self.rows = [self.rows[index] for index in keep]
        index = torch.tensor(keep, device=self._mask.device)
        mask = self._mask[index]
        start = int(mask.argmax(dim=1).min())  # columns left of every row's first token
        self._mask = mask[:, start:]
        self._cache = [(keys[index, :, start:], values[index, :, start:]) for keys, values in self._cache]


def _waves(
    requests: Sequence[tuple[Sequence[int], list[Row]]],
) -> Iterator[Sequence[tuple[Sequence[int], list[Row]]]]:
    """Requests, the shortest prompts first, cut so that a wave has at most PREFILL tokens, unless it is one prompt."""
    start = 0
    for end in range(1, len(requests) + 1):
        if end == len(requests) or (end + 1 - start) * len(requests[end][0]) > PREFILL:
            yield requests[start:end]
            start = end


def _padded(texts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask of texts, int64 [B, T], padded on the left."""
    width = max(map(len, texts))
    ids = torch.tensor([[0] * (width - len(text)) + [*text] for text in texts], device=device)
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts], device=device)
    return ids, mask


def _stack(old: Tensor, new: Tensor, width: int) -> Tensor:
    """[B1, H, T1, D] and [B2, H, T2, D] to [B1+B2, H, width, D], padded on the left."""
    return torch.cat([_left(old, width, 2), _left(new, width, 2)])


def _left(tensor: Tensor, width: int, dim: int) -> Tensor:
    """Zeros on the left of ``dim`` up to ``width``."""
    missing = width - tensor.shape[dim]
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor.new_zeros(shape), tensor], dim=dim)
