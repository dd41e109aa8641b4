"""A sample from the model calls of an episode: rows that share prefixes, each sampled token trained exactly once."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from producers.conversation.calls import AnsweredCall, row_ids, row_images
from producers.engines.routed_experts import RoutedExpertsArray, unknown
from schemas.messages import PlacedImage, Segment, Span, Turn, add_spans


@dataclass(frozen=True)
class _Row:
    """Token ids of a row, and the images at their positions in it."""

    ids: npt.NDArray[Any]
    images: list[PlacedImage]


@dataclass
class Arrays:
    """The tokens of an episode's segments in order, with the arrays of SampledCompletion for them."""

    tokens: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    images: list[PlacedImage] = field(default_factory=list)
    experts: list[npt.NDArray[Any] | int] = field(default_factory=list)
    """Of each segment's tokens, [T, L, k]; a number of tokens if their experts are unknown."""

    def routed_experts(self) -> npt.NDArray[Any] | None:
        """Return the experts of all tokens, as in SampledCompletion."""
        first = next((part for part in self.experts if not isinstance(part, int)), None)
        if first is None:
            return None
        parts = [unknown(part, first) if isinstance(part, int) else part for part in self.experts]
        whole: npt.NDArray[Any] = np.concatenate(parts)
        return whole

    def add(
        self,
        role: str,
        ids: Sequence[int],
        logprobs: list[float] | None = None,
        call: int = -1,
        reward: float | None = None,
    ) -> None:
        """Add a turn: tokens that the policy read, or sampled with these log-probabilities in a call of this number."""
        if not ids:
            return
        start = len(self.tokens)
        self.tokens += ids
        self.loss_mask += [0 if logprobs is None else 1] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs
        self.turns.append(Turn(role, start, len(self.tokens), call, reward))


def choose_calls(calls: Collection[AnsweredCall]) -> list[AnsweredCall]:
    """Return the calls to train, without choices of a request (n > 1) that no later request contains.

    A choice with its own reward stays; if no choice of a request was used, the first stays.
    """
    choices: dict[int, list[AnsweredCall]] = {}
    for call in calls:
        choices.setdefault(id(call.asked), []).append(call)
    chosen = []
    for group in choices.values():
        used = [call for call in group if call.used or call.reward is not None]
        chosen += used or group[:1]
    return sorted(chosen, key=lambda call: call.number)


def join_rows(every: dict[int, AnsweredCall], kept: Sequence[AnsweredCall], numbers: dict[int, int]) -> Arrays:
    """Put the calls into rows: each extends its parent's row, or starts a row if another call already extends that.

    every: all calls by number. kept: those to train, in order of time. numbers: each call's number in messages.
    A new row shares the longest prefix with an earlier row, but none of the tokens that were sampled in it.
    """
    rows: list[list[AnsweredCall]] = []
    ends: dict[int, int] = {}
    for call in kept:
        place = ends.pop(call.parent, None) if call.parent is not None else None
        if place is None:
            place = len(rows)
            rows.append([])
        rows[place].append(call)
        ends[call.number] = place
    arrays = Arrays()
    earlier: list[_Row] = []
    for row in rows:
        if any(call.completion.tokens for call in row):
            _add_row(arrays, every, row, earlier, numbers)
    return arrays


def _add_row(
    arrays: Arrays,
    every: dict[int, AnsweredCall],
    row: Sequence[AnsweredCall],
    earlier: list[_Row],
    numbers: dict[int, int],
) -> None:
    first = row[0]
    prompt = row_ids(every, first.parent) + first.suffix
    whole = _Row(np.asarray(row_ids(every, row[-1].number), np.int32), row_images(every, row[-1].number))
    lengths = [_common_prefix(whole, other, len(prompt)) for other in earlier]
    shared = max(lengths, default=0)
    parent = lengths.index(shared) if shared else -1
    start = len(arrays.tokens)
    arrays.add("prompt", prompt[shared:])
    length, experts = len(prompt), RoutedExpertsArray()
    for k, call in enumerate(row):
        length += (len(call.suffix) if k else 0) + len(call.completion.tokens)
        experts.add(call.completion, length)
        if k:
            arrays.add(str(call.new[-1].get("role", "user")) if call.new else "user", call.suffix)
        add_spans(arrays.spans, call.completion.spans, len(arrays.tokens))
        logprobs = call.completion.logprobs.tolist()
        arrays.add("assistant", call.completion.tokens, logprobs, numbers[call.number], call.reward)
    known_experts = experts.whole(len(whole.ids))
    arrays.experts.append(len(arrays.tokens) - start if known_experts is None else known_experts[shared:])
    arrays.segments.append(Segment(start, len(arrays.tokens), parent, shared, first.name))
    begin = start - shared
    arrays.images += [
        PlacedImage(image.digest, begin + image.start, begin + image.end)
        for image in whole.images
        if image.start >= shared
    ]
    earlier.append(whole)


def _common_prefix(one: _Row, other: _Row, most: int) -> int:
    """Return how many tokens, at most so many, two rows have in common; an image counts wholly or not at all."""
    size = min(most, len(other.ids))
    different = np.flatnonzero(one.ids[:size] != other.ids[:size])
    same = int(different[0]) if len(different) else size
    pairs = zip_longest(one.images, other.images)
    unlike = next((pair for pair in pairs if pair[0] != pair[1]), ())
    return min([same, *(image.start for image in unlike if image is not None)])
