"""Finds the services that hold shared GPUs though they are stopped or hang: only their end frees the memory.

A holder touches its lock's file each second (schemas/system/device_lock.py). It is silent if the file's time has stayed
the same for SILENT_S at two looks, so that neither a machine which itself was suspended nor a file server with another
clock costs a service its GPUs.
"""

from schemas.system.device_lock import DeviceLock, SharedGpus, generator_lock, trainer_lock

SILENT_S = 30.0
LOOK_S = 5.0


class SilentHolders:
    """The looks at the locks of one run. The trainer watches its other ranks itself (distributed/watchdog.py)."""

    def __init__(self, shared: SharedGpus) -> None:
        self._locks = {"trainer": trainer_lock(shared.folder)}
        self._locks |= {name: generator_lock(shared.folder, name) for name in shared.generators}
        self._times: dict[str, tuple[int, float]] = {}
        """Of each lock's file, its time and when that was first seen."""
        self._suspects: set[str] = set()
        self._looked = -LOOK_S

    def look(self, now: float) -> set[str]:
        """Return the names of services to kill. now: monotonic seconds; looks at most once in LOOK_S."""
        if now - self._looked < LOOK_S:
            return set()
        self._looked = now
        old = {name: lock for name, lock in self._locks.items() if self._age_s(name, lock, now) > SILENT_S}
        found = {holder for name, lock in old.items() if (holder := _holder(name, lock)) is not None}
        overdue, self._suspects = found & self._suspects, found
        return overdue

    def _age_s(self, name: str, lock: DeviceLock, now: float) -> float:
        try:
            touched = lock.file.stat().st_mtime_ns
        except OSError:
            return 0.0
        if self._times.get(name, (None,))[0] != touched:
            self._times[name] = touched, now
        return now - self._times[name][1]


def _holder(name: str, lock: DeviceLock) -> str | None:
    """Return who holds the lock called ``name``; None if it is free. A generator's is shared by the trainer's ranks."""
    if not lock.is_free(shared=True):
        return name
    return None if name == "trainer" or lock.is_free() else "trainer"
