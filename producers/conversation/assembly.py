"""A sample from the model calls of an episode: rows that share prefixes, each sampled token trained exactly once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from producers.conversation.calls import AnsweredCall, row_ids
from schemas.messages import Segment, Span, Turn


@dataclass
class Arrays:
    """Tokens of an episode's segments one after the other, with what is known of each, as in SampledCompletion."""

    tokens: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)

    def read(self, role: str, ids: Sequence[int]) -> None:
        """Add tokens that the policy read."""
        self._append(role, ids, 0, [0.0] * len(ids), -1, None)

    def sampled(self, call: AnsweredCall, number: int) -> None:
        """Add an answer. number: of its call, in the order of time."""
        start, completion = len(self.tokens), call.completion
        self._append("assistant", completion.tokens, 1, completion.logprobs.tolist(), number, call.reward)
        for span in completion.spans:
            last = self.spans[-1] if self.spans else None
            if last is not None and last.version == span.version and last.end == start + span.start:
                self.spans[-1] = Span(span.version, last.start, start + span.end)
            else:
                self.spans.append(Span(span.version, start + span.start, start + span.end))

    def _append(
        self, role: str, ids: Sequence[int], mask: int, logprobs: list[float], call: int, reward: float | None
    ) -> None:
        if not ids:
            return
        start = len(self.tokens)
        self.tokens += ids
        self.loss_mask += [mask] * len(ids)
        self.logprobs += logprobs
        self.turns.append(Turn(role, start, len(self.tokens), call, reward))


def choose_calls(calls: Collection[AnsweredCall]) -> list[AnsweredCall]:
    """Return the calls to train, without the choices of a request (n > 1) that no later one contains.

    One with a reward of its own stays; of a request none of whose choices was used, the first does.
    """
    choices: dict[int, list[AnsweredCall]] = {}
    for call in calls:
        choices.setdefault(id(call.asked), []).append(call)
    kept = []
    for group in choices.values():
        used = [call for call in group if call.used or call.reward is not None]
        kept += used or group[:1]
    return sorted(kept, key=lambda call: call.number)


def join_rows(every: dict[int, AnsweredCall], kept: Sequence[AnsweredCall], numbers: dict[int, int]) -> Arrays:
    """Put the calls into rows: each extends the row of its parent, or begins one where another call already does.

    every: all calls by number, kept: those to train, in the order of time, numbers: the number each has on the wire.
    A new row shares the longest prefix that an earlier row has too, but none of the tokens that were sampled in it.
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
    earlier: list[npt.NDArray[Any]] = []
    for row in rows:
        if any(call.completion.tokens for call in row):
            _add_row(arrays, every, row, earlier, numbers)
    return arrays


def _add_row(
    arrays: Arrays,
    every: dict[int, AnsweredCall],
    row: Sequence[AnsweredCall],
    earlier: list[npt.NDArray[Any]],
    numbers: dict[int, int],
) -> None:
    first = row[0]
    prompt = row_ids(every, first.parent) + first.suffix
    whole = np.asarray(row_ids(every, row[-1].number), np.int32)
    lengths = [_common_prefix(whole[: len(prompt)], other) for other in earlier]
    shared = max(lengths, default=0)
    parent = lengths.index(shared) if shared else -1
    start = len(arrays.tokens)
    arrays.read("prompt", prompt[shared:])
    for k, call in enumerate(row):
        if k:
            arrays.read(str(call.new[-1].get("role", "user")) if call.new else "user", call.suffix)
        arrays.sampled(call, numbers[call.number])
    arrays.segments.append(Segment(start, len(arrays.tokens), parent, shared, first.name))
    earlier.append(whole)


def _common_prefix(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> int:
    size = min(len(one), len(other))
    different = np.flatnonzero(one[:size] != other[:size])
    return int(different[0]) if len(different) else size
