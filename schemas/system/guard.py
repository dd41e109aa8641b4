"""The guardian of one process, a service or a worker of one: whatever happens, nothing that it started outlives it.

Started as ``python -I -S guard.py FD NAME`` by deploy/supervisor/process.py, whose words are used here, and by
schemas/system/guarded_process.py; with the standard library only, so that it costs milliseconds. FD is one end of a
socket to the supervisor: the guardian reads a line with the service's command (JSON, and not among the arguments, so
that a search for the service by its command line doesn't find the guardian too), writes ``pid N`` and
``exit CODE`` lines, and reads one-letter commands, ``T`` (ask the service to end) and ``K``
(kill everything now). The end of the socket means that the supervisor is gone, however it went:
the service is asked to end and soon killed.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
ORPHAN_GRACE_S = 2.0
"""How long a service may take to end after its supervisor died."""
KILL_DEADLINE_S = 10.0
"""Killed processes that are not gone by then hang in the kernel."""


def prctl(option: int, value: int) -> bool:
    """Linux prctl with one argument; False elsewhere or when the kernel refuses."""
    if not sys.platform.startswith("linux"):
        return False
    return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)


def parents() -> dict[int, int]:
    """Parent of every process that /proc shows; empty where there is no /proc."""
    found: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                    # The command name is in parentheses and may hold anything, parentheses included.
                    found[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    return found


def descendants(root: int, parent_of: dict[int, int]) -> list[int]:
    """Process ids of everything below ``root``."""
    children: dict[int, list[int]] = {}
    for pid, parent in parent_of.items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def readable(descriptors: Iterable[int], wait_s: float | None) -> set[int]:
    """Wait until something can be read from one of them, or it has ended; None: for ever.

    Not by select, which takes no number above 1023: a process with many connections hands on higher ones.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(None if wait_s is None else wait_s * 1000)}


def kill(pids: Iterable[int]) -> None:
    """SIGKILL to each that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


class Guardian:
    """The guardian of a service process and of everything below it."""

    def __init__(self, control: socket.socket, program: list[str]) -> None:
        self._control = control
        self._program = program
        self._pid = 0
        self._code: int | None = None
        self._kill_at: float | None = None

    def run(self) -> int:
        """Start the service, watch it, clean up behind it; returns its exit code, negative for a signal."""
        # Orphans of the service come to this process instead of init, even those in sessions of their own.
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        wake_read, wake_write = os.pipe()
        for end in (wake_read, wake_write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, lambda *_: self._ask())
        self._pid = self._fork()
        self._say(f"pid {self._pid}")
        listening = True
        while self._reap():
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                break
            wait = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
            watched = [wake_read, self._control.fileno()] if listening else [wake_read]
            ready = readable(watched, wait)
            if wake_read in ready:
                os.read(wake_read, 4096)
            if self._control.fileno() in ready:
                listening = self._obey()
        self._clean_up()
        code = -signal.SIGKILL if self._code is None else self._code
        self._say(f"exit {code}")
        return code

    def _fork(self) -> int:
        guard = os.getpid()
        forwarded = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        # Blocked, so that a signal to the child waits until the guardian's handlers are gone from it.
        signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)
        pid = os.fork()
        if pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, forwarded)
            return pid
        signal.set_wakeup_fd(-1)
        for signum in (*forwarded, signal.SIGCHLD):
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, forwarded)
        # The service gets a process group of its own, and dies with its guardian.
        os.setpgid(0, 0)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)
        try:
            os.execvp(self._program[0], self._program)
        except OSError as error:
            os.write(2, f"cannot start {self._program[0]}: {error.strerror}\n".encode())
            os._exit(127)

    def _reap(self) -> bool:
        """Collect the dead; False when the service itself is among them."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self._pid:
                    self._code = os.waitstatus_to_exitcode(status)
        return self._code is None

    def _obey(self) -> bool:
        """Do what the supervisor says; False when it is gone."""
        try:
            commands = self._control.recv(64)
        except OSError:
            commands = b""
        if b"K" in commands:
            self._kill_at = time.monotonic()
        elif b"T" in commands:
            self._ask()
        elif not commands:
            self._ask()
            self._kill_at = time.monotonic() + ORPHAN_GRACE_S
        return bool(commands)

    def _ask(self) -> None:
        # Only the service itself: it knows best how to end what it started.
        if self._pid and self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)

    def _clean_up(self) -> None:
        """Kill all that is left. As subreaper this process has no children any more exactly when nothing is left."""
        deadline = time.monotonic() + KILL_DEADLINE_S
        while time.monotonic() < deadline:
            kill(descendants(os.getpid(), parents()))
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == self._pid:
                self._code = os.waitstatus_to_exitcode(status)
            elif pid == 0:
                time.sleep(0.005)

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self._control.sendall(f"{line}\n".encode())


def main() -> None:
    """Entry point: ``guard.py FD NAME``; the name is shown in lists of processes."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    line = b""
    while not line.endswith(b"\n"):
        byte = control.recv(1)
        if not byte:
            return
        line += byte
    code = Guardian(control, json.loads(line)).run()
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
