"""Processes that each play one role of a benchmark, on command, and report their processor time."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Protocol, Self

from schemas.errors import InfraError, TidemillError

START_DEADLINE_S = 60.0


class Member(Protocol):
    """One role. ``job`` names what to do, ``amount`` how much; returns figures of its own."""

    def run(self, job: str, amount: float) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Share:
    """One member's part in a job. started, ended: monotonic seconds. cpu_s: user and system time of its process."""

    started: float
    ended: float
    cpu_s: float
    figures: dict[str, Any] = field(default_factory=dict)


class Crew:
    """``with Crew({"producer": make}) as crew: crew.run("job", 10, deadline_s=60)``; makers must be picklable."""

    def __init__(self, makers: Mapping[str, Callable[[], Member]]) -> None:
        self._makers = makers
        self._members: dict[str, tuple[multiprocessing.process.BaseProcess, Connection]] = {}
        self._tick: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        spawn = multiprocessing.get_context("spawn")
        for name, make in self._makers.items():
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(theirs, make), name=name, daemon=True)
            process.start()
            theirs.close()
            self._members[name] = (process, ours)
        try:
            for name in self._members:
                self._answer(name, time.monotonic() + START_DEADLINE_S, "starting")
        except InfraError as error:
            self.__exit__(InfraError, error, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, traceback: TracebackType | None) -> None:
        for process, pipe in self._members.values():
            pipe.close()
            if kind is not None:
                # Others still wait for the one that failed.
                process.terminate()
        for process, _ in self._members.values():
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join(5)

    def run(
        self, job: str, amount: float, deadline_s: float, tick: Callable[[float], None] = lambda seconds: None
    ) -> dict[str, Share]:
        """Let all do their part of a job at once; InfraError when one fails or is not done before the deadline.

        tick: told the seconds since the start, a few times a second.
        """
        started = time.monotonic()
        self._tick = lambda: tick(time.monotonic() - started)
        deadline = started + deadline_s
        for _, pipe in self._members.values():
            pipe.send((job, amount))
        return {name: self._answer(name, deadline, job) for name in self._members}

    def _answer(self, name: str, deadline: float, doing: str) -> Share:
        pipe = self._members[name][1]
        while not pipe.poll(0.2):
            self._tick()
            for other, (peer, _) in self._members.items():
                if not peer.is_alive():
                    # What it had to say is still in its pipe.
                    name, pipe = other, self._members[other][1]
            if time.monotonic() > deadline:
                raise InfraError(f"the benchmark's {name} was not done in time while {doing}")
        try:
            answer: Share | str = pipe.recv()
        except EOFError as error:
            raise InfraError(f"the benchmark's {name} ended without a word while {doing}") from error
        if isinstance(answer, str):
            raise InfraError(f"the benchmark's {name} failed while {doing}: {answer}")
        return answer


def _serve(pipe: Connection, make: Callable[[], Member]) -> None:
    """A member's process: make the role, then do jobs until the pipe is closed."""
    try:
        member = make()
        pipe.send(Share(0.0, 0.0, 0.0))
        while True:
            job, amount = pipe.recv()
            cpu, started = time.process_time(), time.monotonic()
            figures = member.run(job, amount)
            pipe.send(Share(started, time.monotonic(), time.process_time() - cpu, figures))
    except (EOFError, ConnectionError, KeyboardInterrupt):
        return
    except TidemillError as error:
        pipe.send(str(error))
