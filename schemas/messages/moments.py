"""Moments: the parts of an episode's time, of which its trace is made. Messages carry them where traces are on.

A trace travels as bytes, one MessagePack array a moment, so that services which only pass it on neither parse nor build
anything, and add to it by appending. An array has a moment as it was noted, and readers compute the rest: few are read.
"""

import hashlib
import time
from collections.abc import Iterable
from typing import Any, Literal

import msgpack
import msgspec

MomentKind = Literal["admitted", "attempt", "chat", "tool", "term", "step"]


class Moment(msgspec.Struct, frozen=True, gc=False):
    """A part of an episode, from ``start`` to ``end``, Unix microseconds by the clock of the machine where it was.

    kind: ``admitted``, an instant; ``attempt`` of a generator; ``chat`` and ``tool``, calls in an attempt; ``term`` of
    the reward; ``step`` that trained it. name: of the generator, the tool, the term, or the step's number. tokens: that
    were sampled in it; an attempt that has them is a single call. failed: it brought no result. An attempt without a
    length is that of a finished sample, whose message has its seconds and its tokens.
    """

    kind: MomentKind
    name: str
    start: int
    end: int
    tokens: int = 0
    failed: bool = False


class Noted(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A moment as a trace has it. end: Unix nanoseconds. seconds: that it took. The rest: as in Moment."""

    kind: MomentKind
    name: str
    end: int
    seconds: float
    tokens: int = 0
    failed: bool = False


# As the messages themselves: an encoder for nothing else would have left the processor's caches at each sample.
_encode = msgspec.msgpack.Encoder().encode
LONGEST_S = 1e9
"""Seconds that no moment takes."""


def now_us() -> int:
    """Return Unix microseconds by this machine's clock."""
    return time.time_ns() // 1000


def pack(*moments: Moment) -> bytes:
    """Return moments as a trace, or as its continuation."""
    return pack_noted(
        Noted(one.kind, one.name, one.end * 1000, (one.end - one.start) / 1e6, one.tokens, one.failed)
        for one in moments
    )


def pack_noted(moments: Iterable[Noted]) -> bytes:
    """Return moments that were noted as a trace, or as its continuation."""
    return b"".join(map(_encode, moments))


def ending(kind: MomentKind, name: str, seconds: float, failed: bool = False) -> bytes:
    """Return the trace of a moment of ``seconds`` that ends now."""
    noted = (kind, name, time.time_ns(), seconds, 0, True) if failed else (kind, name, time.time_ns(), seconds)
    return _encode(noted)


def unpack(trace: bytes, seconds: float = 0.0, tokens: int = 0) -> list[Moment]:
    """Return the moments of a trace, none of one that can't be read. seconds, tokens: of the finished sample."""
    reader = msgpack.Unpacker()
    reader.feed(trace)
    try:
        found = msgspec.convert(list(reader), list[Noted])
    except (msgspec.ValidationError, msgpack.UnpackException, ValueError):
        return []
    # MessagePack has numbers without an end, and some that are no time.
    if not all(abs(one.seconds) < LONGEST_S for one in found):
        return []
    took = int(seconds * 1e6)
    moments: list[Moment] = []
    for one in found:
        start, end = (one.end - round(one.seconds * 1e9)) // 1000, one.end // 1000
        if one.kind == "attempt" and not one.seconds:
            moments.append(Moment("attempt", one.name, end, end + took, tokens))
        else:
            moments.append(Moment(one.kind, one.name, start, end, one.tokens, one.failed))
    return moments


def trace_id(run: str, task_id: int, sample: int) -> bytes:
    """Return the 16 bytes that name a sample's trace, in every process and however often they are asked for."""
    return hashlib.blake2b(f"{run}\0{task_id}\0{sample}".encode(), digest_size=16).digest()


def nest(trace: bytes, seconds: float = 0.0, tokens: int = 0) -> list[tuple[Moment, int]]:
    """Return the moments of a trace in order of time, each with the index of its parent, -1 for the whole episode.

    The step is last, by whichever clock: it is trained again after a crash, and nothing may change its place.
    A call belongs to the last attempt that began before it, which is taken to last as long as its calls. seconds,
    tokens: as in ``unpack``.
    """
    nested: list[tuple[Moment, int]] = []
    attempt = -1
    found = unpack(trace, seconds, tokens)
    for one in sorted(found, key=lambda one: (one.kind == "step", one.start, one.kind != "attempt")):
        if one.kind == "attempt":
            attempt = len(nested)
        inside = attempt if one.kind in ("chat", "tool") else -1
        nested.append((one, inside))
        if one.kind == "attempt" and one.tokens:
            nested.append((Moment("chat", "", one.start, one.end, one.tokens), attempt))
        elif inside >= 0 and one.end > nested[inside][0].end:
            nested[inside] = (msgspec.structs.replace(nested[inside][0], end=one.end), -1)
    return nested


def trace_lines(trace: bytes, seconds: float, tokens: int) -> list[dict[str, Any]]:
    """Return the moments of a trace in order of time, as JSON; times in Unix seconds. The rest: as in ``nest``."""
    return [
        msgspec.structs.asdict(one) | {"start": one.start / 1e6, "end": one.end / 1e6}
        for one, _ in nest(trace, seconds, tokens)
    ]
