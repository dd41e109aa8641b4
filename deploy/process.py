"""One guarded child process, and the promise that nothing it starts is left behind.

Three nets: a guardian per child (deploy/guard.py) that kills everything below it when the
child ends or this process dies; the kernel's parent-death signal should the guardian itself
be killed; and ``sweep``, with which this process then finds the grandchildren.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy import guard

MARK = "TIDEMILL_SUPERVISOR"
"""Environment variable that tells this supervisor's processes, at any depth, from all others."""


@dataclass(frozen=True)
class Exit:
    """How a process ended: its exit code, negative for a signal."""

    code: int

    def __str__(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        return f"killed by {name}"


class Process:
    """A child in a session of its own.

    Life cycle::

        process = Process(["sleep", "5"], log=Path("sleep.log"))
        process.poll()        # None while it runs
        process.terminate()   # SIGTERM to the child alone
        process.kill()        # SIGKILL to it and to everything below it
        process.poll()        # Exit(...) once nothing of it is left
    """

    def __init__(
        self,
        argv: Sequence[str],
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        mark: str = "",
    ) -> None:
        """Start at once. Output is appended to ``log``, or shares this process's own when it is None."""
        ours, theirs = socket.socketpair()
        output = None
        try:
            output = log.open("ab", buffering=0) if log else None
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, str(theirs.fileno()), *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                cwd=folder,
                env={**os.environ, **(environment or {}), **({MARK: mark} if mark else {})},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        finally:
            theirs.close()
            if output:
                output.close()
        ours.setblocking(False)
        self._control = ours
        self._heard = ""
        self._exit: Exit | None = None

    @property
    def orphaned(self) -> bool:
        """Whether it ended because its guardian was killed, so that something may be left for ``sweep``."""
        return self._exit is not None and self._told("exit") is None

    @property
    def guard_pid(self) -> int:
        """Process id of the guardian."""
        return self._process.pid

    @property
    def pid(self) -> int | None:
        """Process id of the child itself, None until the guardian has told it."""
        self._listen()
        return self._told("pid")

    def poll(self) -> Exit | None:
        """How it ended, or None while anything of it runs."""
        if self._exit is None:
            code = self._process.poll()
            if code is not None:
                self._listen()
                told = self._told("exit")
                # Without a last word the guardian itself was killed, and its child with it.
                self._exit = Exit(code if told is None else told)
                self._control.close()
        return self._exit

    def terminate(self) -> None:
        """Ask the child to end."""
        self._send(b"T")

    def kill(self) -> None:
        """Kill the child and everything below it."""
        self._send(b"K")

    def _send(self, command: bytes) -> None:
        if self._exit is None:
            try:
                self._control.send(command)
            except OSError:
                # The guardian is ending; poll says how.
                return

    def _listen(self) -> None:
        while self._exit is None:
            try:
                data = self._control.recv(256)
            except OSError:
                return
            if not data:
                return
            self._heard += data.decode()

    def _told(self, word: str) -> int | None:
        for line in self._heard.splitlines():
            name, _, value = line.partition(" ")
            if name == word:
                return int(value)
        return None


def new_mark() -> str:
    """A value of ``MARK`` that no other supervisor has."""
    return uuid.uuid4().hex


def become_subreaper() -> bool:
    """Let orphans of killed guardians come to this process instead of init; False where the system can't."""
    return guard.prctl(guard.PR_SET_CHILD_SUBREAPER, 1)


def sweep(mark: str, known: set[int]) -> list[int]:
    """Kill and collect children of this process that carry ``mark`` and are not ``known`` guardians.

    Those are what a killed guardian left. Returns their process ids; call it again until it is empty.
    """
    parent_of = guard.parents()
    strays = [
        pid for pid, parent in parent_of.items() if parent == os.getpid() and pid not in known and _marked(pid, mark)
    ]
    for stray in strays:
        guard.kill([stray, *guard.descendants(stray, parent_of)])
        try:
            os.waitpid(stray, os.WNOHANG)
        except ChildProcessError:
            continue
    return strays


def _marked(pid: int, mark: str) -> bool:
    try:
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
