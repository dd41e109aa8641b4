"""Locks on GPUs that a trainer and generators share in turns, by the kernel: a process that dies frees its own.

In the folder ``devices/`` of a run, ``generator-K.lock`` is held exclusively by generator K while its engine is awake,
and shared by all ranks of the trainer while their tensors are on the GPU. ``trainer.lock`` is held exclusively by the
trainer's rank 0 from when it wants the GPUs until it gives them back.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec

VARIABLE = "TIDEMILL_SHARED_GPUS"
"""Environment variable with a SharedGpus as JSON, for services that share GPUs."""


class SharedGpus(msgspec.Struct, frozen=True):
    """Who shares the trainer's GPUs. folder: of the locks. generators: their numbers. others: generators elsewhere."""

    folder: str
    generators: list[int]
    others: int = 0

    @classmethod
    def from_environment(cls) -> SharedGpus | None:
        """Return what this process was started with; None if it shares no GPU."""
        text = os.environ.get(VARIABLE)
        return msgspec.json.decode(text, type=cls) if text else None


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
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        self.touch()
        return True

    def release(self) -> None:
        """Free the lock, if this process holds it."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def is_free(self) -> bool:
        """Return whether no process holds the lock."""
        if self._descriptor is not None or not self.try_hold():
            return False
        self.release()
        return True

    def touch(self) -> None:
        """Show that the holder is alive: a supervisor may kill one whose file is old."""
        os.utime(self.file)
