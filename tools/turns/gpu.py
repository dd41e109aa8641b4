"""GPUs that are imitated: memory there is a lock on a file, which only the kernel frees for a process that dies.

So a process that is stopped keeps its memory, as on a GPU, and two that have memory at once are seen at once.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Sequence
from pathlib import Path

DYING_S = 0.05
"""A killed process frees one file after the other: so long it may still have memory when its place is taken."""


class WalkFiles:
    """The files of a walk. violations: one line each, by whichever process saw it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.devices, self.memory, self.progress = folder / "devices", folder / "memory", folder / "progress"
        self.violations, self.newest = folder / "violations", folder / "newest"

    def make(self) -> None:
        """Make the folders, and version 1."""
        for folder in (self.devices, self.memory, self.progress):
            folder.mkdir(parents=True)
        self.violations.touch()
        self.publish(1)

    def violate(self, text: str) -> None:
        """Note a violation, and end this process: what it would do next is of no interest."""
        self.note(text)
        os._exit(70)

    def note(self, text: str) -> None:
        """Note a violation."""
        with self.violations.open("a") as file:
            file.write(f"{text}\n")

    def publish(self, version: int) -> None:
        """Make ``version`` the newest."""
        aside = self.newest.with_suffix(".new")
        aside.write_text(str(version))
        aside.replace(self.newest)

    def published(self) -> int:
        """Return the newest version."""
        return int(self.newest.read_text())


class ImitatedGpus:
    """The memory that one process has on some GPUs, all or nothing."""

    def __init__(self, files: WalkFiles, who: str, gpus: Sequence[int]) -> None:
        self._files, self._who = files, who
        self._paths = [files.memory / f"gpu-{gpu}" for gpu in gpus]
        self._open: list[int] = []

    @property
    def held(self) -> bool:
        """Whether this process has memory."""
        return bool(self._open)

    def take(self) -> None:
        """Allocate; a violation if another process, which is not dying, has memory there."""
        for path in () if self._open else self._paths:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            while not _locked(file):
                owner = os.pread(file, 100, 0).decode()
                time.sleep(DYING_S)
                if _lives(owner):
                    self._files.violate(f"{self._who} allocates on {path.name} while {owner} has memory there")
            os.ftruncate(file, 0)
            os.pwrite(file, f"{self._who} {os.getpid()}".encode(), 0)
            self._open.append(file)

    def free(self) -> None:
        """Free everything."""
        while self._open:
            os.close(self._open.pop())

    def need(self, what: str) -> None:
        """Note a violation unless this process has memory."""
        if not self._open:
            self._files.violate(f"{self._who} {what} without memory on its GPUs")


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def has_memory(pid: int) -> bool:
    """Return whether a process has memory on a GPU: the only files that it holds by flock()."""
    locks = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    return any("FLOCK" in fields and str(pid) in fields for fields in locks)


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process."""
    return _state(str(pid)) == "T"


def _lives(owner: str) -> bool:
    """Whether the process ``NAME PID`` lives, stopped or not; False for one that has not written its name yet."""
    return _state(owner.rpartition(" ")[2]) not in ("Z", "X", "")


def _state(pid: str) -> str:
    """Return the kernel's letter for what a process does; "" for none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] if pid else ""
    except OSError:
        return ""
