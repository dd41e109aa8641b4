"""A tracker in a thread of its own, so that no step waits for one that hangs.

Calls are done in order. If one raises or takes longer than its deadline, it is the last, and ``problem`` says why.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from schemas.errors import describe_error

DEADLINE_S = 60.0
"""Seconds for one call of a tracker, and for room in its queue if it is slower than the steps."""
LONG_DEADLINE_S = 120.0
"""Seconds for its start, and for the calls left at the end."""
ROOM = 1000
"""Calls that may wait."""

Call: TypeAlias = Callable[[], object]


class TrackerThread:
    """One tracker's calls, done one after another in one thread: some trackers know their run by the thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.error: Exception | None = None
        """The exception that a call raised."""
        self._calls: queue.Queue[Call | None] = queue.Queue(ROOM)
        self._done = threading.Condition()
        self._left = 0
        self._since = 0.0
        """When the current call began, or the one before it ended."""
        self._late = ""
        # A daemon: the process does not wait for it at its end.
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str:
        """Why the tracker was dropped, "" while it works."""
        if self.error is not None:
            return describe_error(self.error)
        if not self._late and self._left and time.monotonic() - self._since > DEADLINE_S:
            self._late = f"it did not answer within {DEADLINE_S:g} s"
        return self._late

    def put(self, call: Call) -> None:
        """Queue a call; waits only for room in the queue."""
        with self._done:
            if not self._left:
                self._since = time.monotonic()
            self._left += 1
        try:
            self._calls.put(call, timeout=DEADLINE_S)
        except queue.Full:
            self._late = self._late or f"{ROOM} calls of it were left for {DEADLINE_S:g} s"

    def wait(self, deadline_s: float) -> None:
        """Wait until all calls are done or the tracker is dropped; it is dropped after the deadline."""
        if not self.is_idle(deadline_s):
            self._late = self._late or f"it did not answer within {deadline_s:.3g} s"

    def is_idle(self, within_s: float) -> bool:
        """Return whether all calls are done, or the tracker is dropped, within this time."""
        with self._done:
            return self._done.wait_for(lambda: not self._left or self.error is not None, within_s)

    def end(self) -> None:
        """Let the thread end after the call that it is making."""
        self._late = self._late or "ended"
        try:
            self._calls.put_nowait(None)
        except queue.Full:
            return  # the thread ends before the next call

    def _work(self) -> None:
        while (call := self._calls.get()) is not None and not self._late:
            try:
                call()
            except Exception as error:  # noqa: BLE001 - user code: it costs the run this tracker
                self._finish(error)
                return
            self._finish()

    def _finish(self, error: Exception | None = None) -> None:
        with self._done:
            self.error = error
            self._left -= 1
            self._since = time.monotonic()
            self._done.notify_all()
