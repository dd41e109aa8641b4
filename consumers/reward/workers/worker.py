"""The process that calls reward functions which may block: ``python -m consumers.reward.workers.worker``.

Calls come in on stdin and results go out on stdout, as length-prefixed MessagePack, one at a time; what functions print
goes to stderr. The process ends at the end of stdin, and with its guardian (schemas/guard.py).
"""

from __future__ import annotations

import importlib
import os
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from consumers.reward.rewards.terms import RewardInput, Term, TermResult, resolve
from schemas.config import RewardTerm
from schemas.errors import ConfigError

PREFIX = struct.Struct("<I")


class Setup(msgspec.Struct):
    """First message to a worker. search: the service's module search path."""

    terms: list[dict[str, Any]]
    base: str
    search: list[str]


class Ready(msgspec.Struct):
    """First message from a worker; ``error`` says why it cannot work, and is empty when it can."""

    error: str = ""


class Call(msgspec.Struct):
    """A call of a term, by its index, on a sample. number: of this call."""

    number: int
    term: int
    sample: RewardInput


class Answer(msgspec.Struct):
    """The answer to the call with this number."""

    number: int
    result: TermResult


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
    own = os.getpid()
    try:
        terms = _prepare(setup)
    except ConfigError as error:
        _write(replies, Ready(error=str(error)))
        return 2
    _end_unless(own)
    _write(replies, Ready())
    decoder = msgspec.msgpack.Decoder(Call)
    while (data := _read(requests)) is not None:
        call = decoder.decode(data)
        result = terms[call.term].call(call.sample)
        _end_unless(own)
        _write(replies, Answer(call.number, result))
    return 0


def _end_unless(own: int) -> None:
    """End a copy of this process, which user code made by a fork and let come back here: it has nothing to answer."""
    if os.getpid() != own:
        os._exit(1)


def _prepare(setup: Setup) -> list[Term]:
    sys.path[:] = setup.search
    terms = resolve([RewardTerm.model_validate(term) for term in setup.terms], Path(setup.base))
    for term in terms:
        needs = getattr(term.function, "needs", None)
        if needs is not None:
            # Imported now, so that no call is charged for it.
            importlib.import_module(needs[0])
    return terms


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
