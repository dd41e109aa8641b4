"""One run of hostile programs in a sandbox, several at once, and what of this machine they got at."""

from __future__ import annotations

import collections
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from schemas.errors import InfraError
from schemas.system.sandbox.bubblewrap import UID
from schemas.system.sandbox.jail import Sandbox
from schemas.system.sandbox.limits import Limits, find_interpreter
from tools.hostile.programs import Targets, make_program

LIMITS = Limits(wall_s=0.5, cpu_s=1.0, memory_mb=256, processes=8, disk_mb=8)
LATEST_S = 20.0
"""No program may last longer, however busy the machine is."""
TRIES = 12
"""So often a program is started that hardly comes to run, each time with twice the time, up to ``MOST_S``."""
MOST_S = 3.0
_MOUNTED = ("/", "/tmp", "/usr", "/proc")
ENDING_S = 10.0
"""Processes that are still there so long after the last program are called left."""


@dataclass
class HostileReport:
    """The result of a run. escapes, left: one line each; late: seeds of programs that lasted too long.

    programs: those that came to run; again: starts after one that did not; not_started: with none that did.
    """

    programs: int = 0
    kinds: collections.Counter[str] = field(default_factory=collections.Counter)
    ends: collections.Counter[str] = field(default_factory=collections.Counter)
    escapes: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    again: int = 0
    not_started: list[str] = field(default_factory=list)
    seconds: float = 0.0


def targeted_mounts(mounts: str, folder: Path) -> list[str]:
    """Return the lines of /proc/mounts whose places programs try to change: other services mount elsewhere."""
    lines = [(line, Path(line.split()[1])) for line in mounts.splitlines()]
    return [line for line, place in lines if str(place) in _MOUNTED or place.is_relative_to(folder)]


class Bait:
    """Targets for programs, and whether one of them was reached."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "bait"
        self._folder.mkdir()
        self.text = f"secret-{secrets.token_hex(8)}"
        secret = self._folder / "secret"
        secret.write_text(self.text, encoding="utf-8")
        for path in (folder, self._folder):
            path.chmod(0o777)
        secret.chmod(0o666)
        self._servers = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)]
        self._servers[1].bind(str(self._folder / "socket"))
        abstract = socket.socket(socket.AF_UNIX)
        word = f"hostile-{secrets.token_hex(8)}"
        abstract.bind(f"\0{word}")
        self._servers.append(abstract)
        (self._folder / "socket").chmod(0o777)
        for server in self._servers:
            server.listen()
            server.setblocking(False)
        as_user = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--"] if os.geteuid() == 0 else []
        self.victim = subprocess.Popen([*as_user, "sleep", "100000"])
        self.targets = Targets(
            str(self._folder), str(secret), self._servers[0].getsockname()[1], word, self.victim.pid, word
        )
        self._mounts = self._targeted()
        self._hostname = socket.gethostname()

    def reached(self) -> Iterator[str]:
        """What was reached."""
        if sorted(path.name for path in self._folder.iterdir()) != ["secret", "socket"]:
            yield f"files in the bait: {list(self._folder.iterdir())}"
        if (self._folder / "secret").read_text(encoding="utf-8") != self.text:
            yield "the secret was overwritten"
        for server in self._servers:
            try:
                server.accept()
            except BlockingIOError:
                continue
            yield f"a program connected to {server.getsockname()}"
        if self.victim.poll() is not None or psutil.Process(self.victim.pid).status() == psutil.STATUS_STOPPED:
            yield "the other process was hit by a signal"
        if self._targeted() != self._mounts:
            yield "the mounts of this machine changed"
        if socket.gethostname() != self._hostname:
            yield "the name of this machine changed"

    def _targeted(self) -> list[str]:
        return targeted_mounts(Path("/proc/mounts").read_text(encoding="utf-8"), self._folder)

    def left(self) -> list[str]:
        """Processes of programs that are still there after ENDING_S: the system ends those of a sandbox one by one."""
        deadline = time.monotonic() + ENDING_S
        while (found := [*self._processes()]) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _processes(self) -> Iterator[str]:
        for process in psutil.process_iter():
            try:
                if any(self.targets.word in one for one in process.cmdline()):
                    yield f"process {process.pid}: {process.cmdline()}"
            except psutil.Error:
                continue

    def close(self) -> None:
        for server in self._servers:
            server.close()
        self.victim.send_signal(signal.SIGKILL)
        self.victim.wait()


@contextmanager
def bait() -> Iterator[Bait]:
    """Targets, as long as the block runs."""
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        laid = Bait(Path(folder))
        try:
            yield laid
        finally:
            laid.close()


def run_programs(sandbox: Sandbox, seeds: range, workers: int = 2, limits: Limits = LIMITS) -> HostileReport:
    """Run the programs of these seeds, and look at the machine after them."""
    report, lock, began = HostileReport(), threading.Lock(), time.monotonic()
    python = find_interpreter()
    with bait() as laid:

        def run(seed: int) -> None:
            program = make_program(seed, laid.targets)
            command = [*python.command, "{job}/main.py", laid.targets.word]
            files = {"main.py": program.code.encode()}
            for attempt in range(TRIES):
                started, outcome, reason = time.monotonic(), None, ""
                try:
                    longer = replace(limits, wall_s=min(MOST_S, limits.wall_s * 2**attempt))
                    outcome = sandbox.run(command, b"", files, longer, python.mounts)
                except InfraError as error:
                    reason = f"{seed}: {error}"
                with lock:
                    report.again += attempt > 0
                    if time.monotonic() - started > LATEST_S:
                        report.late.append(seed)
                    if outcome is not None:
                        report.programs += 1
                        report.kinds[program.kind] += 1
                        report.ends[outcome.end] += 1
                        if laid.text.encode() in outcome.stdout + outcome.stderr:
                            report.escapes.append(f"seed {seed}, {program.kind}: it read the secret")
                        return
            with lock:
                report.not_started.append(reason)

        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(run, seeds))
        report.escapes += laid.reached()
        report.left += laid.left()
    report.seconds = time.monotonic() - began
    return report
