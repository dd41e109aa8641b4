"""Finds the services that hold shared GPUs though they are stopped or hang: only their end frees the memory.

A holder touches its lock's file each second (schemas/system/device_lock.py). It is silent if the file is old at two
looks, so that a machine which itself was suspended, or whose clock was set, costs no service its GPUs.
"""

from schemas.system.device_lock import DeviceLock, SharedGpus, generator_lock, trainer_lock

SILENT_S = 30.0
LOOK_S = 5.0


class SilentHolders:
    """The looks at the locks of one run. The trainer watches its other ranks itself (distributed/watchdog.py)."""

    def __init__(self, shared: SharedGpus) -> None:
        self._locks = {"trainer": trainer_lock(shared.folder)}
        self._locks |= {name: generator_lock(shared.folder, name) for name in shared.generators}
        self._suspects: set[str] = set()
        self._looked = 0.0

    def look(self, now: float) -> set[str]:
        """Return the names of services to kill. now: Unix seconds; looks nowhere until LOOK_S after the last time."""
        if abs(now - self._looked) < LOOK_S:
            return set()
        self._looked = now
        old = {name: lock for name, lock in self._locks.items() if _age_s(lock, now) > SILENT_S}
        found = {holder for name, lock in old.items() if (holder := _holder(name, lock)) is not None}
        overdue, self._suspects = found & self._suspects, found
        return overdue


def _age_s(lock: DeviceLock, now: float) -> float:
    try:
        return now - lock.file.stat().st_mtime
    except OSError:
        return 0.0


def _holder(name: str, lock: DeviceLock) -> str | None:
    """Return who holds the lock called ``name``; None if it is free. A generator's is shared by the trainer's ranks."""
    if not lock.is_free(shared=True):
        return name
    return None if name == "trainer" or lock.is_free() else "trainer"
