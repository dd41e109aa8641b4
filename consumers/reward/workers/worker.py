"""The process that calls reward functions which may block: ``python -m consumers.reward.workers.worker``.

Calls and replies are messages on the socket that is stdin (schemas/system/worker_process.py); what functions print goes
to stderr. Most workers do one call at a time. The worker of a term with a concurrency has many calls in flight, in one
event loop for life, and says each second that it is alive. The worker of a function of lists collects calls. The
process ends with the connection, and with its guardian (schemas/system/guard.py).
"""

import asyncio
import contextlib
import importlib
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from consumers.reward.rewards.clock import CLOCK, CallClock
from consumers.reward.rewards.signatures import RewardInput
from consumers.reward.rewards.terms import Term, TermResult, resolve
from schemas.config import RewardTerm
from schemas.errors import ConfigError, describe_error
from schemas.system.worker_process import WorkerChannel, frame, read_message

ALIVE_S = 1.0
"""Seconds after which a worker with many calls in flight says that it is alive, by a message without a body."""


class WorkerSetup(msgspec.Struct):
    """First message to a worker. terms: those that it calls, by index. search: the service's module search path.

    timeout_s: deadline of a call; a worker with many calls in flight keeps it by itself.
    """

    terms: dict[int, dict[str, Any]]
    base: str
    search: list[str]
    timeout_s: float

    @classmethod
    def of(cls, terms: Sequence[RewardTerm], base: Path, serves: Sequence[int], timeout_s: float) -> Self:
        """Return the set-up of a worker of this process."""
        return cls({i: terms[i].model_dump() for i in serves}, str(base.resolve()), list(sys.path), timeout_s)


class WorkerReady(msgspec.Struct):
    """First message from a worker; ``error`` says why it cannot work, and is empty if it can."""

    error: str = ""


class WorkerCall(msgspec.Struct):
    """A call of a term, by its index, on a sample. number: of this call."""

    number: int
    term: int
    sample: RewardInput


class WorkerReply(msgspec.Struct):
    """The result of the call with this number."""

    number: int
    result: TermResult


_CALL = msgspec.msgpack.Decoder(WorkerCall)


def main() -> int:
    """Serve calls until stdin ends."""
    channel = WorkerChannel(socket.socket(fileno=os.dup(0)))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    setup = channel.receive(msgspec.msgpack.Decoder(WorkerSetup))
    if setup is None:
        return 0
    try:
        terms = _prepare(setup)
    except ConfigError as error:
        channel.send(WorkerReady(error=str(error)))
        return 2
    channel.send(WorkerReady())
    (first, *others) = terms.values()
    if not others and first.traits.concurrency:
        asyncio.run(_serve_many(channel, first, setup.timeout_s))
    else:
        _serve(channel, terms, batch=0 if others else first.batch, wait_s=first.wait_s, timeout_s=setup.timeout_s)
    return 0


def _serve(channel: WorkerChannel, terms: dict[int, Term], batch: int, wait_s: float, timeout_s: float) -> None:
    """Do one call after the other; of a function of lists, up to ``batch`` calls at once."""
    # For as long as the process lives, so that a client which an async function keeps stays usable.
    finish = asyncio.new_event_loop().run_until_complete
    while (call := channel.receive(_CALL)) is not None:
        if not batch:
            CLOCK.set(CallClock(timeout_s))
            channel.send(WorkerReply(call.number, terms[call.term].call(call.sample, finish)))
            continue
        calls = [call]
        full = time.monotonic() + wait_s
        with contextlib.suppress(TimeoutError):
            while len(calls) < batch:
                following = channel.receive(_CALL, max(0.0, full - time.monotonic()))
                if following is None:
                    return
                calls.append(following)
        results = terms[call.term].call_batch([call.sample for call in calls], finish)
        for call, result in zip(calls, results, strict=True):
            channel.send(WorkerReply(call.number, result))


async def _serve_many(channel: WorkerChannel, term: Term, timeout_s: float) -> None:
    """Do calls as they come, all in this event loop."""
    own = os.getpid()
    reader, writer = await asyncio.open_connection(sock=channel.connection)
    running: set[asyncio.Task[None]] = set()

    def send(message: WorkerReply | None) -> None:
        if os.getpid() != own:
            os._exit(1)
        writer.write(frame(message))

    async def reply(call: WorkerCall) -> None:
        send(WorkerReply(call.number, await _timed(term, call.sample, timeout_s)))

    async def say_alive() -> None:
        while True:
            await asyncio.sleep(min(ALIVE_S, timeout_s / 4))
            send(None)

    alive = asyncio.create_task(say_alive())
    try:
        while (call := await read_message(reader, _CALL)) is not None:
            task = asyncio.create_task(reply(call))
            running.add(task)
            task.add_done_callback(running.discard)
    except (asyncio.IncompleteReadError, ConnectionResetError):
        # The service has closed the connection or is gone; the guardian kills what is left.
        alive.cancel()


async def _timed(term: Term, sample: RewardInput, timeout_s: float) -> TermResult:
    """Call within the deadline. A call that ignores its cancellation is left running."""
    clock, started = CallClock(timeout_s), time.perf_counter()
    CLOCK.set(clock)
    task = asyncio.create_task(term.call_async(sample))
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


def _prepare(setup: WorkerSetup) -> dict[int, Term]:
    sys.path[:] = setup.search
    terms: dict[int, Term] = {}
    for index, term in setup.terms.items():
        (terms[index],) = resolve([RewardTerm.model_validate(term)], Path(setup.base))
        traits = terms[index].traits
        if traits.needs is not None:
            # Imported now, so that no call is charged for it.
            importlib.import_module(traits.needs[0])
        if traits.prepare is not None:
            try:
                traits.prepare(**terms[index].args)
            except Exception as error:
                raise ConfigError(f"reward {terms[index].label!r}: {describe_error(error)}") from error
    return terms


if __name__ == "__main__":
    sys.exit(main())
