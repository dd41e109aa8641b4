"""Reports of user code that blocks the event loop of all agents in this process."""

from __future__ import annotations

import asyncio
import os
import selectors
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .connection import end_a_copy

BLOCKED_S = 1.0
"""An event loop that stands still for longer is reported."""
_LOOK_S, _TELL_S = 0.25, 0.5
_LIBRARY, _FOLDER = str(Path(os.__file__).parent), str(Path(__file__).parent)


class Selector(selectors.DefaultSelector):
    """The event loop's selector. It records since when the loop has been running callbacks."""

    turn = 0
    busy_since: float | None = None

    def select(self, timeout: float | None = None) -> Any:
        end_a_copy()
        self.busy_since = None
        events = super().select(timeout)
        self.turn += 1
        self.busy_since = time.monotonic()
        return events


class LoopWatch:
    """Reports the event loop when it runs nothing but one task, or one callback, for longer than BLOCKED_S.

    owner: the episode of a task, if known. report: called with the episode, the line, the seconds, and whether it is
    the first report of this block.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        selector: Selector,
        owner: Callable[[Any], int | None],
        report: Callable[[int | None, str, float, bool], None],
    ) -> None:
        self._loop, self._selector, self._owner, self._report = loop, selector, owner, report

    def run(self) -> None:
        """Watch for ever, in a thread."""
        begun, last_report, before = 0.0, 0.0, None
        while True:
            time.sleep(_LOOK_S)
            try:
                task = asyncio.current_task(self._loop)
                now, since = time.monotonic(), self._selector.busy_since
                seen = (self._selector.turn, id(task))
                if since is None or seen != before:
                    begun, last_report, before = now, 0.0, seen
                elif now - begun >= BLOCKED_S and now - last_report >= _TELL_S:
                    first, last_report = not last_report, now
                    where = blocking_line(threading.main_thread().ident)
                    self._report(self._owner(task), where, round(now - begun, 2), first)
            except RuntimeError:
                # A dictionary of the loop changed during the lookup.
                continue


def blocking_line(thread: int | None) -> str:
    """Return the function of user code that a thread is in, with its file and line."""
    frame: Any = sys._current_frames().get(thread or 0)
    innermost = frame
    while frame is not None:
        file = frame.f_code.co_filename
        if not (file.startswith((_LIBRARY, "<frozen", _FOLDER)) or "site-packages" in file):
            break
        frame = frame.f_back
    frame = frame or innermost
    return "" if frame is None else f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"
