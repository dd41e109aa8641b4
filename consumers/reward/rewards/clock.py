"""The deadline of a call that runs beside others: a clock that stands still while the call waits for its turn."""

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar


class CallClock:
    """Time that a call has left, seconds. It stands still inside ``stopped``."""

    def __init__(self, timeout_s: float) -> None:
        self._left = timeout_s
        self._since = time.monotonic()
        self._stops = 0

    def left(self) -> float:
        """Seconds until the deadline, 0 or less once it has passed."""
        return self._left if self._stops else self._left - (time.monotonic() - self._since)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Inside, no time passes."""
        self._left = self.left()
        self._stops += 1
        try:
            yield
        finally:
            self._stops -= 1
            self._since = time.monotonic()


_ENDLESS = CallClock(float("inf"))
CLOCK: ContextVar[CallClock] = ContextVar("clock", default=_ENDLESS)
"""The clock of the running call; outside of calls, one that never ends."""
