"""The processes of a benchmark: the server under test, and roles that do jobs on command, with their resources.

The server is an embedded one of its own, or one that the user names.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import psutil

from broker.connection.connection import open_client
from broker.connection.embedded import EmbeddedServer
from deploy.services.allocator import keep_freed_memory
from schemas.errors import InfraError, TidemillError

AOF_MODES = ("off", "everysec", "always")


@contextmanager
def serving(url: str | None, aof: str) -> Iterator[str]:
    """Yield the URL of a server whose append-only file is ``aof``; a user's server is not changed."""
    if url is not None:
        yield url
        return
    fsync = "everysec" if aof == "off" else aof
    with (
        tempfile.TemporaryDirectory(prefix="tidemill-bench-") as folder,
        EmbeddedServer(Path(folder), fsync=fsync) as server,
    ):
        if aof == "off":
            open_client(server.url).config_set("appendonly", "no")
        yield server.url


@dataclass(frozen=True)
class ServerUsage:
    """Resources of the server since it started: processor seconds, bytes in and out; bytes of memory now."""

    cpu_s: float
    wire: int
    memory: int

    @classmethod
    def of(cls, url: str) -> ServerUsage:
        """Query the server at ``url``."""
        info: dict[str, Any] = open_client(url).info()
        return cls(
            cpu_s=float(info["used_cpu_user"]) + float(info["used_cpu_sys"]),
            wire=int(info["total_net_input_bytes"]) + int(info["total_net_output_bytes"]),
            memory=int(info["used_memory"]),
        )


def describe(url: str) -> str:
    """Return name and version of the server."""
    info: dict[str, Any] = open_client(url).info("server")
    version = info.get("valkey_version")
    return f"valkey {version}" if version else f"redis {info['redis_version']}"


def cpu_s(pid: int) -> float:
    """Return user and system time of a process so far, in seconds."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


START_DEADLINE_S = 300.0
"""Seconds that suffice on a busy machine."""


class BenchRole(Protocol):
    """A role in a benchmark. ``job`` names the work, ``amount`` its size; the role returns its own figures."""

    def run(self, job: str, amount: float) -> dict[str, Any]: ...


@dataclass(frozen=True)
class RoleUsage:
    """A role's part in a job. started, ended: monotonic seconds. cpu_s: user and system time of its process."""

    started: float
    ended: float
    cpu_s: float
    figures: dict[str, Any] = field(default_factory=dict)


class RoleProcesses:
    """Processes of one role each, made by ``makers``, which must be picklable.

    ::

        with RoleProcesses({"producer": make}) as roles:
            roles.run("job", 10, deadline_s=60)
    """

    def __init__(self, makers: Mapping[str, Callable[[], BenchRole]]) -> None:
        self._makers = makers
        self._processes: dict[str, tuple[multiprocessing.process.BaseProcess, Connection]] = {}
        self._tick: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        spawn = multiprocessing.get_context("spawn")
        for name, make in self._makers.items():
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(theirs, make), name=name, daemon=True)
            process.start()
            theirs.close()
            self._processes[name] = (process, ours)
        try:
            for name in self._processes:
                self._answer(name, time.monotonic() + START_DEADLINE_S, "starting")
        except InfraError as error:
            self.__exit__(InfraError, error, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, traceback: TracebackType | None) -> None:
        for process, pipe in self._processes.values():
            pipe.close()
            if kind is not None:
                # Others still wait for the failed one.
                process.terminate()
        for process, _ in self._processes.values():
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join(5)

    def run(
        self, job: str, amount: float, deadline_s: float, tick: Callable[[float], None] = lambda seconds: None
    ) -> dict[str, RoleUsage]:
        """Let all do their part of a job at once; InfraError if one fails or misses the deadline.

        tick: told the seconds since the start, a few times a second.
        """
        started = time.monotonic()
        self._tick = lambda: tick(time.monotonic() - started)
        deadline = started + deadline_s
        for _, pipe in self._processes.values():
            pipe.send((job, amount))
        return {name: self._answer(name, deadline, job) for name in self._processes}

    def _answer(self, name: str, deadline: float, doing: str) -> RoleUsage:
        pipe = self._processes[name][1]
        while not pipe.poll(0.2):
            self._tick()
            for other, (peer, _) in self._processes.items():
                if not peer.is_alive():
                    # Its last message is still in its pipe.
                    name, pipe = other, self._processes[other][1]
            if time.monotonic() > deadline:
                raise InfraError(f"the benchmark's {name} was not done in time while {doing}")
        try:
            answer: RoleUsage | str = pipe.recv()
        except EOFError as error:
            raise InfraError(f"the benchmark's {name} ended without a word while {doing}") from error
        if isinstance(answer, str):
            raise InfraError(f"the benchmark's {name} failed while {doing}: {answer}")
        return answer


def _serve(pipe: Connection, make: Callable[[], BenchRole]) -> None:
    """Run a role's process: create the role, then do jobs until the pipe is closed."""
    keep_freed_memory()
    try:
        role = make()
        pipe.send(RoleUsage(0.0, 0.0, 0.0))
        while True:
            job, amount = pipe.recv()
            cpu, started = time.process_time(), time.monotonic()
            figures = role.run(job, amount)
            pipe.send(RoleUsage(started, time.monotonic(), time.process_time() - cpu, figures))
    except (EOFError, ConnectionError, KeyboardInterrupt):
        return
    except TidemillError as error:
        pipe.send(str(error))
