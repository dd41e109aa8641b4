"""The watchdogs that end the process of a hung engine or event loop, so that the supervisor restarts it.

They have their own threads: a hung engine may also block the event loop.
"""

import asyncio
import contextlib
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn, Self

import structlog

from schemas.errors import ERROR_EXIT

CHECK_S = 1.0

log = structlog.get_logger()


class Stall:
    """The time that an engine with requests has not grown, less the time in which the process itself was frozen."""

    def __init__(self) -> None:
        self._growth: int | None = None
        self._seen = 0.0
        self._silent_s = 0.0

    def observe(self, growth: int | None, now: float) -> float:
        """Return the seconds without growth, given ``Engine.growth()`` at ``now``."""
        if growth is None or growth != self._growth:
            self._silent_s = 0.0
        else:
            self._silent_s += min(now - self._seen, 2 * CHECK_S)
        self._growth, self._seen = growth, now
        return self._silent_s


class LoopPulse:
    """Whether an event loop still runs, asked by other threads: each question is answered by the loop itself."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._answers = 0
        self._answered = time.monotonic()
        self._asked = False

    def answers(self) -> int:
        """Ask the loop, and return how often it has answered so far."""
        if not self._asked:
            self._asked = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._answer)
        return self._answers

    def silent_s(self) -> float:
        """Return the seconds since the event loop last answered."""
        return time.monotonic() - self._answered

    def _answer(self) -> None:
        self._answers += 1
        self._answered = time.monotonic()
        self._asked = False


class HangWatchdog:
    """A thread that calls ``end`` if ``growth`` has stalled for ``stall_s`` seconds, with ``what`` as the reason."""

    def __init__(
        self,
        growth: Callable[[], int | None],
        stall_s: float,
        end: Callable[[str], None],
        what: str = "the engine hangs: no running request has grown",
    ) -> None:
        self._growth = growth
        self._what = what
        self._stall_s = stall_s
        self._end = end
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stall-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(5)

    def _run(self) -> None:
        stall = Stall()
        while not self._stop.wait(CHECK_S):
            silent_s = stall.observe(self._growth(), time.monotonic())
            if silent_s >= self._stall_s:
                self._end(f"{self._what} for {silent_s:.0f} s (generator.stall_s)")
                return


def end_hung_process(reason: str) -> None:
    """Log the reason and end at once with exit code 1: a hung engine can't be closed."""
    log.error(reason)
    end_process(ERROR_EXIT)


def end_process(code: int) -> NoReturn:
    """End this process at once. Its children are killed: they hold the device and may be too busy to notice the end."""
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
