"""Where the seconds of a process's devices go: each is of exactly one use, so that the uses add up to its life."""

import threading
import time
from collections.abc import Callable
from typing import Literal, TypeAlias

import psutil

DeviceUse: TypeAlias = Literal["compute", "wait", "load", "pause", "asleep"]
"""compute: it samples or trains. wait: it has nothing to do. load: the process starts, or writes or reads weights.

pause: by an order, or because the broker is silent. asleep: the device is lent to another service, which counts it too.
"""


class DeviceClock:
    """The milliseconds of a process's devices by use, since the process began: in use ``load`` at first.

    devices: how many the process computes on. now: the clock, in seconds. age_s: of the process.
    """

    def __init__(self, devices: int = 1, now: Callable[[], float] = time.monotonic, age_s: float | None = None) -> None:
        self.devices = devices
        self._now = now
        self._use: DeviceUse = "load"
        # 0 where the system's clock was set back since the process began.
        age_s = max(0.0, time.time() - psutil.Process().create_time()) if age_s is None else age_s
        self._since = now() - age_s
        self._spent: dict[str, float] = {}
        self._lock = threading.Lock()

    def turn(self, use: DeviceUse) -> None:
        """Count from now on for this use."""
        with self._lock:
            self._count()
            self._use = use

    def read_ms(self) -> dict[str, int]:
        """Return the milliseconds by use so far, of all devices together; from any thread."""
        with self._lock:
            self._count()
            return {use: int(1000 * seconds) for use, seconds in self._spent.items()}

    def _count(self) -> None:
        now = self._now()
        self._spent[self._use] = self._spent.get(self._use, 0.0) + (now - self._since) * self.devices
        self._since = now
