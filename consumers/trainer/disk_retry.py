"""What a trainer does while a disk is full: it waits for room, says so, and gives up after a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, TypeAlias

import structlog

from schemas.errors import DiskError
from schemas.lifecycle import StopFlag

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 10.0

Tell: TypeAlias = Callable[[str, Literal["info", "warning", "error"], str], None]
"""Tells people something: name of the event, its level, and the text."""

log = structlog.get_logger()


class DiskRetry:
    """Does what writes; training waits for it, because going on would leave the broker with ever more data.

    stop: the trainer's own, once it runs; who is asked to stop has no patience.
    """

    def __init__(self, deadline_s: float, tell: Tell) -> None:
        self._deadline_s = deadline_s
        self._tell = tell
        self.stop = StopFlag()

    def __call__(self, what: str, act: Callable[[], None]) -> None:
        """Do ``act``, and again while it fails with DiskError; that error when asked to stop or after the deadline."""
        deadline = time.monotonic() + self._deadline_s
        wait = FIRST_WAIT_S
        while True:
            try:
                return act()
            except DiskError as error:
                if self.stop or time.monotonic() > deadline:
                    raise
                self.refused(what, error)
            self.stop.wait(wait)
            wait = min(2 * wait, LONGEST_WAIT_S)

    def refused(self, what: str, error: DiskError) -> None:
        """Say that there is no room for ``what``, which will be tried again."""
        log.warning("waiting for room", writing=what, error=str(error))
        self._tell(what, "error", str(error))
