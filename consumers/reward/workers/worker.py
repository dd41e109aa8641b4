"""The process that calls reward functions which may block: ``python -m consumers.reward.workers.worker``.

Calls come in on stdin and results go out on stdout, as length-prefixed MessagePack, one at a time; what functions print
goes to stderr. The process ends with its parent: at the end of stdin, and on Linux by a signal when the parent dies.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from consumers.reward.rewards.terms import RewardInput, Term, resolve
from schemas.config import RewardTerm
from schemas.errors import ConfigError

PREFIX = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1


class Setup(msgspec.Struct):
    """First message to a worker. search: the parent's module search path. parent: its process id."""

    terms: list[dict[str, Any]]
    base: str
    search: list[str]
    parent: int


class Ready(msgspec.Struct):
    """First message from a worker; ``error`` says why it cannot work, and is empty when it can."""

    error: str = ""


class Call(msgspec.Struct):
    """A call of a term, by its index, on a sample; the answer is a TermResult."""

    term: int
    sample: RewardInput


def main() -> int:
    """Serve calls until stdin ends."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    first = _read(requests)
    if first is None:
        return 0
    setup = msgspec.msgpack.decode(first, type=Setup)
    _die_with(setup.parent)
    try:
        terms = _prepare(setup)
    except ConfigError as error:
        _write(replies, Ready(error=str(error)))
        return 2
    _write(replies, Ready())
    decoder = msgspec.msgpack.Decoder(Call)
    while (data := _read(requests)) is not None:
        call = decoder.decode(data)
        _write(replies, terms[call.term].call(call.sample))
    return 0


def _prepare(setup: Setup) -> list[Term]:
    sys.path[:] = setup.search
    terms = resolve([RewardTerm.model_validate(term) for term in setup.terms], Path(setup.base))
    for term in terms:
        needs = getattr(term.function, "needs", None)
        if needs is not None:
            # Imported now, so that no call is charged for it.
            importlib.import_module(needs[0])
    return terms


def _die_with(parent: int) -> None:
    """Be killed when the parent's thread that started this process ends (Linux only)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)  # it died before the call above


def _read(stream: BinaryIO) -> bytes | None:
    prefix = stream.read(PREFIX.size)
    if len(prefix) < PREFIX.size:
        return None
    (size,) = PREFIX.unpack(prefix)
    data = stream.read(size)
    return data if len(data) == size else None


def _write(stream: BinaryIO, message: Any) -> None:
    data = msgspec.msgpack.encode(message)
    stream.write(PREFIX.pack(len(data)) + data)
    stream.flush()


if __name__ == "__main__":
    sys.exit(main())
