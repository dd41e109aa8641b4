"""The process that calls reward functions which may block: ``python -m consumers.reward.workers.worker``.

Calls come in on stdin and results go out on stdout, as length-prefixed MessagePack; what functions print goes to
stderr. Most workers do one call at a time. The worker of a term with a concurrency has many in flight, in one event
loop for life, and says each second that it is alive; that of a function of lists collects them. The process ends at the
end of stdin, and with its guardian (schemas/system/guard.py).
"""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from consumers.reward.rewards.clock import CLOCK, CallClock
from consumers.reward.rewards.signatures import RewardInput
from consumers.reward.rewards.terms import Term, TermResult, resolve
from schemas.config import RewardTerm
from schemas.errors import ConfigError, describe_error

PREFIX = struct.Struct("<I")
ALIVE = PREFIX.pack(0)
"""What a worker with many calls in flight says in between: a message without a body."""
ALIVE_S = 1.0


class Setup(msgspec.Struct):
    """First message to a worker. search: the service's module search path. serves: the terms that it calls, by index.

    timeout_s: deadline of a call, which a worker with many in flight keeps itself.
    """

    terms: list[dict[str, Any]]
    base: str
    search: list[str]
    serves: list[int]
    timeout_s: float

    @classmethod
    def of(cls, terms: Sequence[RewardTerm], base: Path, serves: Sequence[int], timeout_s: float) -> Setup:
        """The set-up of a worker that is started by this process."""
        told = [term.model_dump() for term in terms]
        return cls(told, str(base.resolve()), list(sys.path), list(serves), timeout_s)


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


class Channel:
    """The connection to the service, for a worker that does one thing at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._held = bytearray()
        self._own = os.getpid()

    def read(self, timeout_s: float | None = None) -> bytes | None:
        """The next message, None at the end. TimeoutError if none has come in time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if len(self._held) >= PREFIX.size:
                (size,) = PREFIX.unpack_from(self._held)
                if len(self._held) >= PREFIX.size + size:
                    message = bytes(self._held[PREFIX.size : PREFIX.size + size])
                    del self._held[: PREFIX.size + size]
                    return message
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            # A timeout of 0 is another mode, in which what has come is refused with another error.
            self.connection.settimeout(left if left != 0.0 else 1e-6)
            part = self.connection.recv(1 << 20)
            if not part:
                return None
            self._held += part

    def write(self, message: Any) -> None:
        """Send a message. A copy of this process ends here instead: user code made it, and has nothing to answer."""
        if os.getpid() != self._own:
            os._exit(1)
        self.connection.settimeout(None)
        self.connection.sendall(packed(message))


def packed(message: Any) -> bytes:
    """A message with its length before it."""
    data = msgspec.msgpack.encode(message)
    return PREFIX.pack(len(data)) + data


def main() -> int:
    """Serve calls until stdin ends."""
    connection = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    channel = Channel(connection)
    first = channel.read()
    if first is None:
        return 0
    setup = msgspec.msgpack.decode(first, type=Setup)
    try:
        terms = _prepare(setup)
    except ConfigError as error:
        channel.write(Ready(error=str(error)))
        return 2
    channel.write(Ready())
    (one, *others) = terms.values()
    if not others and one.concurrency:
        asyncio.run(_serve_many(channel, one, setup.timeout_s))
        return 0
    # For as long as the process lives, so that a client which an async function keeps stays usable.
    loop = asyncio.new_event_loop()
    if not others and one.batch:
        _serve_batches(channel, one, loop)
    else:
        _serve(channel, terms, loop)
    return 0


def _serve(channel: Channel, terms: dict[int, Term], loop: asyncio.AbstractEventLoop) -> None:
    decoder = msgspec.msgpack.Decoder(Call)
    while (data := channel.read()) is not None:
        call = decoder.decode(data)
        channel.write(Answer(call.number, terms[call.term].call(call.sample, loop.run_until_complete)))


def _serve_batches(channel: Channel, term: Term, loop: asyncio.AbstractEventLoop) -> None:
    decoder = msgspec.msgpack.Decoder(Call)
    while (data := channel.read()) is not None:
        calls = [decoder.decode(data)]
        full = time.monotonic() + term.wait_s
        while len(calls) < term.batch:
            try:
                data = channel.read(max(0.0, full - time.monotonic()))
            except TimeoutError:
                break
            if data is None:
                return
            calls.append(decoder.decode(data))
        results = term.call_batch([call.sample for call in calls], loop.run_until_complete)
        for call, result in zip(calls, results, strict=True):
            channel.write(Answer(call.number, result))


async def _serve_many(channel: Channel, term: Term, timeout_s: float) -> None:
    decoder = msgspec.msgpack.Decoder(Call)
    own = os.getpid()
    reader, writer = await asyncio.open_connection(sock=channel.connection)
    running: set[asyncio.Task[None]] = set()

    def write(data: bytes) -> None:
        if os.getpid() != own:
            os._exit(1)
        writer.write(data)

    async def answer(call: Call) -> None:
        write(packed(Answer(call.number, await _timed(term, call.sample, timeout_s))))

    async def say_alive() -> None:
        while True:
            await asyncio.sleep(min(ALIVE_S, timeout_s / 4))
            write(ALIVE)

    alive = asyncio.create_task(say_alive())
    try:
        while True:
            (size,) = PREFIX.unpack(await reader.readexactly(PREFIX.size))
            task = asyncio.create_task(answer(decoder.decode(await reader.readexactly(size))))
            running.add(task)
            task.add_done_callback(running.discard)
    except (asyncio.IncompleteReadError, ConnectionResetError):
        # The service has closed the connection, or is gone; the guardian ends what is left.
        alive.cancel()


async def _timed(term: Term, sample: RewardInput, timeout_s: float) -> TermResult:
    """Call within the deadline. A call that does not heed its cancellation is left alone."""
    clock, started = CallClock(timeout_s), time.perf_counter()
    token = CLOCK.set(clock)
    task = asyncio.create_task(term.call_async(sample))
    CLOCK.reset(token)
    while (left := clock.left()) > 0 and not task.done():
        await asyncio.wait([task], timeout=left)
    seconds = time.perf_counter() - started
    if not task.done():
        task.cancel()
        return TermResult(status="timeout", reason=f"no result within {timeout_s:g} s", seconds=seconds)
    if task.cancelled():
        return TermResult(status="error", reason="it cancelled itself", seconds=seconds)
    if (error := task.exception()) is not None:
        return TermResult(status="error", reason=f"{type(error).__name__}: {error}", seconds=seconds)
    return task.result()


def _prepare(setup: Setup) -> dict[int, Term]:
    sys.path[:] = setup.search
    terms: dict[int, Term] = {}
    for index in setup.serves:
        (terms[index],) = resolve([RewardTerm.model_validate(setup.terms[index])], Path(setup.base))
        needs = getattr(terms[index].function, "needs", None)
        if needs is not None:
            # Imported now, so that no call is charged for it.
            importlib.import_module(needs[0])
        prepare = getattr(terms[index].function, "prepare", None)
        if prepare is not None:
            try:
                prepare(**terms[index].args)
            except Exception as error:
                raise ConfigError(f"reward {terms[index].label!r}: {describe_error(error)}") from error
    return terms


if __name__ == "__main__":
    sys.exit(main())
