"""What a trainer does while a disk is full: it waits for room, says so, and gives up after a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

from schemas.errors import DiskError
from schemas.lifecycle import StopFlag

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 10.0


def with_patience(
    act: Callable[[], None], deadline_s: float, stop: StopFlag, refused: Callable[[DiskError], None]
) -> None:
    """Do ``act``, and again while it fails with DiskError; that error when asked to stop or after the deadline.

    refused: told of every failure after which it is tried again.
    """
    deadline = time.monotonic() + deadline_s
    wait = FIRST_WAIT_S
    while True:
        try:
            return act()
        except DiskError as error:
            if stop or time.monotonic() > deadline:
                raise
            refused(error)
        stop.wait(wait)
        wait = min(2 * wait, LONGEST_WAIT_S)
