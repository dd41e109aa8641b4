"""Continuous batching over a Hugging Face model: rows join many at a time, step together, and leave when they are done.

Each step samples one token for each row from its logits, with its log-probability. Rows are aligned at their ends and
padded on the left; their keys and values lie in the slots of key_values.py. All of it runs in the engine's thread.
Shapes: B rows in flight, T positions, V vocabulary, G generated tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from producers.engines.base import Completion, GrowingSample
from producers.engines.transformers.key_values import KeyValueSlots
from producers.engines.transformers.routed_experts import RoutedExpertsRecorder

PREFILL = 16384
"""Tokens of the prompts that are prefilled together, with padding."""


@dataclass(frozen=True)
class Draw:
    """How a row is sampled; temperature 0 is greedy. generator: None for torch's own. seed: its seed in exact mode."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    generator: torch.Generator | None = None
    seed: int | None = None


def draw(logits: Tensor, rows: Sequence[Draw]) -> tuple[list[int], list[float]]:
    """Sample one token for each row of logits float32 [B, V]; return ids [B] and natural log-probabilities [B].

    Log-probabilities are of the distribution sampled from: after temperature, top_k and top_p, renormalised. A greedy
    row's are those at temperature 1.
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
class BatchRow(GrowingSample):
    """A sample that is being generated. ``prompt``: its tokens when it joined.

    experts: uint8 or uint16 [..., L, k] of the tokens that were read, in pieces; empty unless they are recorded.
    """

    draw: Draw
    max_tokens: int
    stop: Sequence[str] = ()
    prompt: Sequence[int] = ()
    experts: list[npt.NDArray[Any]] = field(default_factory=list)

    def completion(self) -> Completion:
        # A growing sample is reported often, and callers do not read its experts.
        if self.finish and self.experts:
            self.routed_experts = np.concatenate(self.experts)
        return super().completion()


Joining = tuple[Sequence[int], list[BatchRow]]
"""A prompt and the rows that share it."""


class ContinuousBatch:
    """The rows in flight, in the order of their slots.

    eos: ids that end a row. decode: turns tokens into text, for stop strings. recorder: records experts of each token.
    allowed: the only tokens to sample, None for all.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        eos: set[int],
        decode: Callable[[list[int]], str],
        recorder: RoutedExpertsRecorder | None = None,
        allowed: Sequence[int] | None = None,
    ) -> None:
        self._model = model
        self._eos = eos
        self._decode = decode
        self._recorder = recorder
        self._allowed = None if allowed is None else torch.tensor(allowed, device=model.device)
        self._slots = KeyValueSlots(model.device)
        self.rows: list[BatchRow] = []

    def join(self, requests: Sequence[Joining], version: int) -> None:
        """Add rows of requests and sample the first token of each; prompts of similar length are prefilled together."""
        for prompt, rows in requests:
            for row in rows:
                row.prompt = prompt
        for wave in _waves(sorted(requests, key=lambda request: len(request[0]))):
            self._join(wave, version)
        self.drop_finished()

    def _join(self, wave: Sequence[Joining], version: int) -> None:
        ids, mask = _padded([prompt for prompt, _ in wave], self._model.device)
        logits, fresh = self._prefill(ids, mask)
        counts = torch.tensor([len(rows) for _, rows in wave], device=ids.device)
        if int(counts.max()) > 1:
            logits = logits.repeat_interleave(counts, 0)
            fresh = [(keys.repeat_interleave(counts, 0), values.repeat_interleave(counts, 0)) for keys, values in fresh]
        self._slots.add(fresh, [len(prompt) for prompt, rows in wave for _ in rows])
        joined = [row for _, rows in wave for row in rows]
        if self._recorder is not None:
            for (prompt, rows), experts in zip(wave, self._recorder.take(len(wave)), strict=True):
                for row in rows:
                    row.experts.append(experts[-len(prompt) :])
        self.rows += joined
        self._sample(joined, logits, version)

    def step(self, version: int) -> None:
        """Sample one more token for every row."""
        last = torch.tensor([[row.tokens[-1]] for row in self.rows], device=self._model.device)
        cache, mask, positions = self._slots.grow()
        logits = self._forward(last, mask, positions, cache)
        if self._recorder is not None:
            for row, experts in zip(self.rows, self._recorder.take(len(self.rows)), strict=True):
                row.experts.append(experts)
        self._sample(self.rows, logits, version)
        self.drop_finished()

    def recompute(self) -> None:
        """Recompute keys and values of every row with the current weights."""
        if not self.rows:
            return
        texts = [[*row.prompt, *row.tokens[:-1]] for row in self.rows]  # the last token is the next step's input
        _, fresh = self._prefill(*_padded(texts, self._model.device))
        self._slots.clear()
        self._slots.add(fresh, [len(text) for text in texts])

    @torch.no_grad()
    def score(self, ids: Sequence[int]) -> Tensor:
        """Return the log-probability of each token after the first at temperature 1, float32 [T-1]."""
        tokens = torch.tensor([ids], device=self._model.device)
        logits = self._model(input_ids=tokens).logits[0, :-1].float()
        return torch.log_softmax(logits, dim=-1).gather(1, tokens[0, 1:, None])[:, 0]

    def clear(self) -> None:
        self.rows = []
        self._slots.clear()

    def _prefill(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return logits of the last position, float32 [B, V], and each layer's keys and values, [B, heads, T, head]."""
        cache = DynamicCache()
        logits = self._forward(ids, mask, (mask.cumsum(dim=1) - 1).clamp(min=0), cache)
        return logits, [(layer.keys, layer.values) for layer in cache.layers]  # type: ignore[misc, union-attr]

    @torch.no_grad()
    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Return logits of the last position, float32 [B, V], and write the cache."""
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float()  # type: ignore[no-any-return]

    def _sample(self, rows: list[BatchRow], logits: Tensor, version: int) -> None:
        if self._allowed is not None:
            only = torch.full_like(logits, -torch.inf)
            logits = only.index_copy(1, self._allowed, logits[:, self._allowed])
        self._take(rows, *draw(logits, [row.draw for row in rows]), version)

    def _take(self, rows: Sequence[BatchRow], tokens: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            row.add([token], [logprob], version)
            if token in self._eos or (row.stop and self._stopped(row)):
                row.finish = "stop"
            elif len(row.tokens) >= row.max_tokens:
                row.finish = "length"

    def _stopped(self, row: BatchRow) -> bool:
        # A stop string ends in the newest token, so a tail is enough. A token may be a single byte of it; 8 more for
        # tokens without text of their own.
        tail = row.tokens[-(max(len(stop.encode()) for stop in row.stop) + 8) :]
        text = self._decode(tail)
        return any(stop in text for stop in row.stop)

    def drop_finished(self) -> None:
        finished = [index for index, row in enumerate(self.rows) if row.finish is not None]
        if finished:
            self.rows = [self.rows[index] for index in self._slots.remove(finished)]


def _waves(requests: Sequence[Joining]) -> Iterator[Sequence[Joining]]:
    """Group requests by length into waves of at most PREFILL tokens; a longer prompt is a wave of its own."""
    start = 0
    for end in range(1, len(requests) + 1):
        if end == len(requests) or (end + 1 - start) * len(requests[end][0]) > PREFILL:
            yield requests[start:end]
            start = end


def _padded(texts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ids and mask of texts, int64 [B, T], padded on the left."""
    width = max(map(len, texts))
    ids = torch.tensor([[0] * (width - len(text)) + [*text] for text in texts], device=device)
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts], device=device)
    return ids, mask
