"""Locks on GPUs that a trainer and generators share in turns, by the kernel: a process that dies frees its own.

In the folder ``devices/`` of a run, ``NAME.lock`` is held exclusively by that generator while its engine is awake, and
shared by all ranks of the trainer while their tensors are on the GPU. ``trainer.lock`` is held exclusively by the
trainer's rank 0 from when it wants the GPUs until it gives them back.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

TOUCH_S = 1.0
HELD, LENT, SHARE = "device_held_s", "device_lent_s", "device_share"
PART = "hand_over:"
"""Prefix of parts of the last hand-over: a trainer's wait, offload, onload; a generator's sleep, wake, load, probe."""
_FLOCK = struct.Struct("hhqqi4x")
"""Linux's ``struct flock``, for locks of an open file; unlike those of flock(), they can be asked about."""
VARIABLE = "TIDEMILL_SHARED_GPUS"
"""Environment variable with a SharedGpus as JSON, for services that share GPUs."""


class SharedGpus(msgspec.Struct, frozen=True):
    """Who shares the trainer's GPUs. folder: of the locks. generators: their names."""

    folder: str
    generators: list[str]

    @classmethod
    def from_environment(cls) -> SharedGpus | None:
        """Return what this process was started with; None if it shares no GPU."""
        text = os.environ.get(VARIABLE)
        return msgspec.json.decode(text, type=cls) if text else None

    def to_environment(self) -> str:
        """Return the variable's value."""
        return msgspec.json.encode(self).decode()


class TurnClock:
    """How long a process has the GPU that it shares, or has it not, and its share of the time since it began.

    parts: seconds of each part of its last hand-over.
    """

    def __init__(self) -> None:
        self._began = self._since = time.monotonic()
        self._holds, self._held_s = False, 0.0
        self.parts: dict[str, float] = {}

    def turn(self, holds: bool) -> None:
        """Note that the process has the GPU from now on, or has it no more."""
        self._held_s = self._total()
        self._holds, self._since = holds, time.monotonic()

    @contextlib.contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Measure a part of a hand-over in a block."""
        began = time.monotonic()
        yield
        self.parts[part] = time.monotonic() - began

    def figures(self) -> dict[str, float]:
        """Return figures for the heartbeat: seconds of this turn, the share of all turns, and the last hand-over."""
        now = time.monotonic()
        share = self._total() / (now - self._began or 1.0)
        parts = {f"{PART}{name}": seconds for name, seconds in self.parts.items()}
        return {HELD if self._holds else LENT: now - self._since, SHARE: share, **parts}

    def _total(self) -> float:
        return self._held_s + self._holds * (time.monotonic() - self._since)


def trainer_lock(folder: str | Path) -> DeviceLock:
    """Return the lock that says that the trainer wants the GPUs."""
    return DeviceLock(Path(folder) / "trainer.lock")


def generator_lock(folder: str | Path, name: str) -> DeviceLock:
    """Return the lock of the GPUs of a generator."""
    return DeviceLock(Path(folder) / f"{name}.lock")


class DeviceLock:
    """A lock that this process may hold, exclusively or shared, as a file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._descriptor: int | None = None

    def try_hold(self, shared: bool = False) -> bool:
        """Take the lock unless another process has it; does not wait."""
        if self._descriptor is not None:
            return True
        self.file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _whole_file(fcntl.F_RDLCK if shared else fcntl.F_WRLCK))
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        self.touch()
        return True

    def release(self) -> None:
        """Free the lock, if this process holds it; also where a child process has a copy of its descriptor."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _whole_file(fcntl.F_UNLCK))
            os.close(descriptor)

    @property
    def held(self) -> bool:
        """Whether this process holds the lock."""
        return self._descriptor is not None

    def is_free(self, shared: bool = False) -> bool:
        """Return whether no process holds the lock; shared: none exclusively.

        Nothing is taken to find out: a process that is stopped meanwhile delays no other.
        """
        if self._descriptor is not None:
            return False
        try:
            descriptor = os.open(self.file, os.O_RDONLY)
        except FileNotFoundError:
            return True
        try:
            found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _whole_file(fcntl.F_RDLCK if shared else fcntl.F_WRLCK))
        finally:
            os.close(descriptor)
        return int(_FLOCK.unpack(found)[0]) == fcntl.F_UNLCK

    def touch(self) -> None:
        """Show that the holder is alive: a supervisor may kill one whose file is old."""
        with contextlib.suppress(OSError):
            os.utime(self.file)


def _whole_file(kind: int) -> bytes:
    """Return the argument of a lock on a whole file; kind: F_RDLCK, F_WRLCK or F_UNLCK."""
    return _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0)


class LockToucher(threading.Thread):
    """A thread that keeps the files of held locks new: a supervisor ends a process that is stopped with a GPU."""

    def __init__(self, locks: Iterable[DeviceLock]) -> None:
        super().__init__(name="device-locks", daemon=True)
        self._locks = tuple(locks)

    def run(self) -> None:
        while True:
            time.sleep(TOUCH_S)
            self.touch()

    def touch(self) -> None:
        """Touch the files of all locks that are held now."""
        for lock in self._locks:
            if lock.held:
                lock.touch()
