"""Guarded child processes: nothing that this process starts is left behind.

Three nets: a guardian for each child (schemas/system/guard.py), which kills everything below it when the child ends or
this process dies; the kernel's parent-death signal, if the guardian itself is killed; and ``OrphanReaper.sweep``, with
which this process then finds the grandchildren. ``Processes`` is the starter for services on this machine.
"""

import os
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from deploy.supervisor.services import Exit, Scaler
from schemas.control_api.status import RunStatus
from schemas.errors import InfraError
from schemas.system import guard
from schemas.system.guarded_process import GuardedProcess

MARK = "TIDEMILL_SUPERVISOR"
"""Environment variable that tells this supervisor's processes, at any depth, from all others."""


class Process:
    """A child in a session of its own.

    Life cycle::

        process = Process(["sleep", "5"], "sleep", log=Path("sleep.log"))
        process.poll()        # None while it runs
        process.terminate()   # SIGTERM to the child alone
        process.kill()        # SIGKILL to it and to everything below it
        process.poll()        # Exit(...) once nothing of it is left
    """

    def __init__(
        self,
        argv: Sequence[str],
        name: str,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        mark: str = "",
    ) -> None:
        """Start at once; output is appended to ``log``, or else shared with this process. InfraError if that fails."""
        shown = {**os.environ, **(environment or {}), **({MARK: mark} if mark else {})}
        try:
            with log.open("ab", buffering=0) if log else nullcontext() as output:
                to, errors = (output.fileno(), subprocess.STDOUT) if output else (None, None)
                self._process = GuardedProcess(argv, name, shown, subprocess.DEVNULL, to, errors, folder)
        except OSError as error:
            raise InfraError(f"cannot start {name}: {error.strerror}") from error
        self._exit: Exit | None = None

    @property
    def orphaned(self) -> bool:
        """Whether it ended because its guardian was killed, so that something may be left for ``sweep``."""
        return self._exit is not None and self._process.exit_code is None

    @property
    def guard_pid(self) -> int:
        """Process id of the guardian, which ends with the process."""
        return self._process.pid

    @property
    def pid(self) -> int | None:
        """Its process id; None until the guardian has told it."""
        self._process.poll()
        return self._process.program_pid

    def poll(self) -> Exit | None:
        """Return how the process ended; None while anything of it runs."""
        if self._exit is None and (code := self._process.poll()) is not None:
            told = self._process.exit_code
            # Without a last word the guardian itself was killed, and its child with it.
            self._exit = Exit(code if told is None else told)
        return self._exit

    def terminate(self) -> None:
        self._process.order_end()

    def kill(self) -> None:
        self._process.order_kill()


class OrphanReaper:
    """Kills and collects adopted children that killed guardians left. ``mark`` is in every process's environment."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self._sessions: set[int] = set()
        self._killed: set[int] = set()

    def orphaned(self, guard_pid: int) -> None:
        """Note that this guardian was killed, so that the processes of its session become children of this process."""
        self._sessions.add(guard_pid)

    def sweep(self, guards: set[int]) -> list[int]:
        """Kill and collect orphans, but not ``guards``. Return those that are left; call it until none is left."""
        if not self._sessions:
            return []
        parent_of = guard.parents()
        children = [pid for pid, parent in parent_of.items() if parent == os.getpid() and pid not in guards]
        orphans = [pid for pid in children if pid in self._killed or self._is_ours(pid)]
        for orphan in orphans:
            below = guard.descendants(orphan, parent_of)
            guard.kill([orphan, *below])
            self._killed.update((orphan, *below))
            with suppress(ChildProcessError):
                os.waitpid(orphan, os.WNOHANG)
        return orphans

    def _is_ours(self, pid: int) -> bool:
        try:
            # A process that is dead already has no environment any more, but still its session.
            if os.getsid(pid) in self._sessions:
                return True
            return f"{MARK}={self.mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False


class Processes:
    """The starter of ``tidemill up``, and a base class for others: what ``start`` runs may be a way to elsewhere."""

    def start(
        self, argv: Sequence[str], name: str, role: str, log: Path | None, environment: Mapping[str, str], mark: str
    ) -> Process:
        return Process(argv, name, log=log, environment=environment, mark=mark)

    def tick(self, scaler: Scaler, status: RunStatus | None) -> None:
        """Does nothing: one machine has what it has."""
