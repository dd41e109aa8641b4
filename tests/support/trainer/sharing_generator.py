"""A generator on the trainer's device: it samples only while it alone holds its lock, and gives way to the trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from broker.queues.tasks import TaskQueue
from schemas.system.device_lock import DeviceLock
from tests.support.trainer.deterministic_run import generate
from tests.support.trainer.trainer_loop import until


class SharingGenerator:
    """Generates for ``Pipeline`` in turns; folder: of the locks. awake: called while it alone has the device."""

    def __init__(self, folder: Path, awake: Callable[[], None] = lambda: None) -> None:
        self._lock, self._wanted = DeviceLock(folder / "generator-0.lock"), DeviceLock(folder / "trainer.lock")
        self._awake = awake

    def generate(self, tasks: TaskQueue, task_id: int, version: int) -> None:
        until(lambda: self._wanted.is_free() and self._lock.try_hold(), "the trainer gives the device")
        try:
            self._awake()
            generate(tasks, task_id, version)
        finally:
            self._lock.release()
