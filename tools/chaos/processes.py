"""The services under test as processes, and a supervisor without patience: what dies is started again at once.

The product's own supervisor gives up after a few restarts in a short time, on purpose.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.supervisor.process import Process
from schemas.errors import CONFIG_EXIT, FENCED_EXIT, OK_EXIT
from schemas.system.device_lock import VARIABLE
from tools.chaos.turns import SHARER, SharedGpu

STOP_GRACE_S = 30.0
RESTART_PAUSE_S = 0.2
EXCERPT_BYTES = 20_000
DEVICE_ROLES = ("trainer", "generator")


@dataclass
class ServiceExit:
    """One end of a service process. asked: what the suite had done to it, '' for nothing. excerpt: file of its last
    words. crashed: they have a traceback, which a service never shows for an error that it foresaw. silent: its log is
    empty, since it had not begun."""

    at: float
    name: str
    pid: int
    code: int
    asked: str
    error: str
    excerpt: str = ""
    crashed: bool = False
    silent: bool = False

    @property
    def expected(self) -> bool:
        if self.asked == "kill":
            return self.code == -signal.SIGKILL
        if self.asked == "zombie":
            return self.code == FENCED_EXIT
        if self.asked == "intruder":
            return self.code == CONFIG_EXIT
        # Python ends by SIGTERM until a service has begun.
        return self.asked == "term" and (self.code == OK_EXIT or (self.silent and self.code == -signal.SIGTERM))


@dataclass
class FleetMember:
    """One service process. stopped: it has been sent SIGSTOP. asked: kill, term, zombie or intruder
    (of a second run), once that was done to it."""

    name: str
    role: str
    process: Process
    log: Path
    offset: int
    started: float
    stopped: bool = False
    asked: str = ""
    asked_at: float = 0.0

    @property
    def pid(self) -> int:
        return self.process.pid or 0

    def signal(self, number: int) -> bool:
        """Send a signal to the service itself; False when it is not there."""
        if self.process.poll() is not None or not self.pid:
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True


@dataclass
class Fleet:
    """All services: ``members`` are restarted, ``guests`` (replicas that leave, zombies) are not.

    device_seconds: of trainer and generators, by this process's clock; a name counts while it is restarted, and once.
    """

    folder: Path
    config: Path
    overrides: Sequence[str]
    lease_s: float
    open_port: Callable[[str], int]
    open_endpoint: Callable[[str, int], int]
    workload: str = "text"
    gpu: SharedGpu | None = None
    members: dict[str, FleetMember] = field(default_factory=dict)
    guests: list[FleetMember] = field(default_factory=list)
    exits: list[ServiceExit] = field(default_factory=list)
    urls: dict[str, str] = field(default_factory=dict)
    endpoints: dict[str, Sequence[str]] = field(default_factory=dict)
    device_seconds: float = 0.0
    _counted: float | None = None
    _due: dict[str, tuple[str, float]] = field(default_factory=dict)

    def start(self, role: str, name: str) -> FleetMember:
        """Start a service that is to run until the end."""
        self.members[name] = self._launch(role, name)
        return self.members[name]

    def invite(self, role: str, name: str, overrides: Sequence[str] = ()) -> FleetMember:
        """Start a replica that leaves later."""
        guest = self._launch(role, name, overrides)
        self.guests.append(guest)
        return guest

    def replace(self, name: str) -> FleetMember:
        """The member becomes a guest, a second process takes its place and name; returns the old one."""
        old = self.members[name]
        old.asked = "zombie"
        self.guests.append(old)
        self.start(old.role, name)
        return old

    def _launch(self, role: str, name: str, overrides: Sequence[str] = ()) -> FleetMember:
        if name not in self.urls:
            self.urls[name] = f"redis://127.0.0.1:{self.open_port(name)}/0"
        log = self.folder / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        own = ["--folder", str(self.folder), "--name", name]
        process = Process(
            [
                *(sys.executable, "-m", "tools.chaos.service", role, str(self.config), *own),
                *(f"broker.url={self.urls[name]}", *self._endpoint(role, name), *self.overrides, *overrides),
            ],
            name,
            log=log,
            environment={
                "CHAOS_LEASE_S": str(self.lease_s),
                "CHAOS_WORKLOAD": self.workload,
                "OMP_NUM_THREADS": "1",
                **self._shares(name),
                "PYTHONUNBUFFERED": "1",
            },
        )
        return FleetMember(name, role, process, log, log.stat().st_size if log.exists() else 0, time.monotonic())

    def _shares(self, name: str) -> dict[str, str]:
        if self.gpu is None or name not in ("trainer", SHARER):
            return {}
        return {VARIABLE: self.gpu.shared.to_environment()}

    def _endpoint(self, role: str, name: str) -> Sequence[str]:
        """Settings of a generator whose agents reach it through the proxy, always at the same port."""
        if role != "generator" or self.workload == "text":
            return ()
        if name not in self.endpoints:
            port = free_port()
            proxied = self.open_endpoint(endpoint(name), port)
            self.endpoints[name] = (
                f"generator.agents.address=127.0.0.1:{port}",
                f"generator.agents.public_url=http://127.0.0.1:{proxied}",
            )
        return self.endpoints[name]

    def all(self) -> list[FleetMember]:
        return [*self.members.values(), *self.guests]

    def up(self) -> int:
        """List the members that run and are not stopped."""
        return sum(not member.stopped and member.process.poll() is None for member in self.members.values())

    def tick(self) -> None:
        """Record processes that ended; restart members; kill those that do not stop."""
        now = time.monotonic()
        names = {*(member.name for member in self.all()), *self._due}
        held = sum(name.startswith(DEVICE_ROLES) for name in names)
        self.device_seconds += held * (now - (self._counted or now))
        self._counted = now
        for name in self.gpu.overdue() if self.gpu is not None else ():
            if (holder := self.members.get(name)) is not None:
                holder.asked = "kill"
                holder.process.kill()
        for member in self.all():
            if member.process.poll() is not None:
                self._ended(member)
            elif member.asked == "term" and not member.stopped and now - member.asked_at > STOP_GRACE_S:
                member.process.kill()
        for name, (role, at) in list(self._due.items()):
            if now >= at:
                del self._due[name]
                self.start(role, name)

    def _ended(self, member: FleetMember) -> None:
        code = member.process.poll()
        exit_ = ServiceExit(time.monotonic(), member.name, member.pid, code.code if code else 0, member.asked, "")
        exit_.silent = not member.log.exists() or member.log.stat().st_size == member.offset
        if not exit_.expected:
            excerpt = self._excerpt(member)
            exit_.excerpt = str(excerpt)
            exit_.error, exit_.crashed = last_words(excerpt.read_text(errors="replace"))
        self.exits.append(exit_)
        if member in self.guests:
            self.guests.remove(member)
        elif self.members.get(member.name) is member:
            del self.members[member.name]
            pause = 0.0 if exit_.expected else RESTART_PAUSE_S
            self._due[member.name] = (member.role, time.monotonic() + pause)

    def _excerpt(self, member: FleetMember) -> Path:
        file = self.folder / "excerpts" / f"{member.name}.{member.pid}.log"
        file.parent.mkdir(exist_ok=True)
        with member.log.open("rb") as log:
            size = log.seek(0, 2)
            log.seek(max(member.offset, size - EXCERPT_BYTES))
            file.write_bytes(log.read())
        return file

    def stop(self, tick: Callable[[], Any]) -> None:
        """Stop all processes, wait, and kill those that do not end. Nothing is started afterwards."""
        self._due.clear()
        for member in self.all():
            if member.stopped:
                member.signal(signal.SIGCONT)
                member.stopped = False
            if not member.asked:
                member.asked, member.asked_at = "term", time.monotonic()
                member.process.terminate()
        end = time.monotonic() + STOP_GRACE_S
        while self.all() and time.monotonic() < end + 10:
            for member in self.all():
                if member.process.poll() is not None:
                    self._ended(member)
                elif time.monotonic() > end:
                    member.process.kill()
            self._due.clear()
            tick()
            time.sleep(0.02)


def endpoint(name: str) -> str:
    """Return the proxy's name for the route from a generator's agents to it."""
    return f"agents of {name}"


def free_port() -> int:
    """A free port that the system gives to no process that asks for any port."""
    while True:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", random.randrange(15_000, 32_000))) as end:
            return int(end.getsockname()[1])


def last_words(text: str) -> tuple[str, bool]:
    """Why a process ended, as its log says it in one line, and whether that was a crash with a traceback."""
    for line in reversed(text.splitlines()):
        if '"service crashed"' in line and line.startswith("{"):
            trace = json.loads(line)["exception"].splitlines()
            said = [part.strip(" |+-") for part in trace if part.strip(" |+-")]
            return said[-1] if said else "a crash", True
        if line.startswith("tidemill: ") or "Traceback (most recent call last)" in line:
            return line.removeprefix("tidemill: "), line.startswith("Traceback")
    return "no last words", False
