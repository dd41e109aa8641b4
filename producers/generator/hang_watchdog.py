"""The watchdog that ends the process of a hung engine, so that the supervisor restarts it and its work is taken up.

It has a thread of its own: a hung engine may hold up the event loop, too, while the heartbeat thread renews the leases
of what will never be done.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import structlog

from schemas.errors import ERROR_EXIT

LOOK_S = 1.0

log = structlog.get_logger()


class Stall:
    """Counts how long an engine with requests has not grown, without time in which nobody looked (a frozen process)."""

    def __init__(self) -> None:
        self._growth: int | None = None
        self._seen = 0.0
        self._silent_s = 0.0

    def look(self, growth: int | None, now: float) -> float:
        """Return the seconds without growth, given ``Engine.growth()`` at ``now``."""
        if growth is None or growth != self._growth:
            self._silent_s = 0.0
        else:
            self._silent_s += min(now - self._seen, 2 * LOOK_S)
        self._growth, self._seen = growth, now
        return self._silent_s


class HangWatchdog:
    """Context manager: looks every second, and calls ``end`` with the reason when the engine hung for ``stall_s``."""

    def __init__(self, growth: Callable[[], int | None], stall_s: float, end: Callable[[str], None]) -> None:
        self._growth = growth
        self._stall_s = stall_s
        self._end = end
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stall-watch", daemon=True)

    def __enter__(self) -> HangWatchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(5)

    def _run(self) -> None:
        stall = Stall()
        while not self._stop.wait(LOOK_S):
            silent_s = stall.look(self._growth(), time.monotonic())
            if silent_s >= self._stall_s:
                self._end(f"the engine hangs: no running request has grown for {silent_s:.0f} s (generator.stall_s)")
                return


def end_hung_process(reason: str) -> None:
    """Say why, and end at once with exit code 1: nothing of a hung engine can be closed."""
    log.error(reason)
    end_process(ERROR_EXIT)


def end_process(code: int) -> NoReturn:
    """End at once, with whatever threads and child processes an engine has.

    The children may be too deep in something to notice that they are alone; they hold the device's memory.
    """
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
