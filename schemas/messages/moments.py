"""Moments: the parts of an episode's time, of which its trace is made. Messages carry them where traces are on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

MomentKind = Literal["admitted", "attempt", "chat", "tool", "term", "step"]


class Moment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of an episode, from ``start`` to ``end``, Unix seconds by the clock of the machine where it was.

    kind: ``admitted``, an instant; ``attempt`` of a generator; ``chat`` and ``tool``, calls in an attempt; ``term`` of
    the reward; ``step`` that trained it. name: of the generator, the tool, the term, or the step's number. tokens: that
    were sampled in it. failed: it brought no result.
    """

    kind: MomentKind
    name: str
    start: float
    end: float
    tokens: int = 0
    failed: bool = False


def trace_id(run: str, task_id: int, sample: int) -> bytes:
    """Return the 16 bytes that name a sample's trace, in every process and however often they are asked for."""
    return hashlib.blake2b(f"{run}\0{task_id}\0{sample}".encode(), digest_size=16).digest()


def trace_lines(moments: Sequence[Moment]) -> list[dict[str, Any]]:
    """Return the moments in order of time, as JSON."""
    return [msgspec.structs.asdict(one) for one, _ in nest(moments)]


def nest(moments: Sequence[Moment]) -> list[tuple[Moment, int]]:
    """Return the moments in order of time, each with the index of its parent among them, -1 for the whole episode.

    A call belongs to the last attempt that began before it, which is taken to last as long as its calls.
    """
    ordered = sorted(moments, key=lambda one: (one.start, one.kind != "attempt"))
    nested: list[tuple[Moment, int]] = []
    attempt = -1
    for one in ordered:
        if one.kind == "attempt":
            attempt = len(nested)
        inside = attempt if one.kind in ("chat", "tool") else -1
        nested.append((one, inside))
        if inside >= 0 and one.end > nested[inside][0].end:
            nested[inside] = (msgspec.structs.replace(nested[inside][0], end=one.end), -1)
    return nested
