"""Writes the supervisor's changes into the run's timeline, where the control plane shows them.

A thread writes, so that a broker which does not answer blocks nothing. The thread retries until the broker answers. If
too many changes wait, the oldest are dropped.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import redis
import structlog

from broker.client import Broker
from deploy.supervisor.services import Change
from schemas.errors import TidemillError
from schemas.messages import Event

NAME = "supervisor"
"""``data["by"]`` of these events."""
KEPT = 200
RETRY_S = 1.0
END_S = 2.0
"""How long the last changes may take when the run ends."""

log = structlog.get_logger()


class TimelineWriter:
    """Accepts changes at any time, also before there is a broker; ``to`` writes all of them.

    ::

        timeline = TimelineWriter()
        timeline.put(Change("broker", "started"))
        with timeline.to(broker): ...
    """

    def __init__(self) -> None:
        self._waiting: deque[Change] = deque(maxlen=KEPT)
        self._wake = threading.Condition()
        self._ending = False

    @contextmanager
    def to(self, broker: Broker) -> Iterator[Self]:
        """Write the changes to this broker, in a thread, until the block has ended and the last ones are written."""
        thread = threading.Thread(target=self._run, args=(broker,), name="timeline", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            with self._wake:
                self._ending = True
                self._wake.notify()
            # If the broker is gone the thread may hang; it dies with the process.
            thread.join(END_S)

    def put(self, change: Change) -> None:
        """Queue a change. Never waits for the broker."""
        with self._wake:
            self._waiting.append(change)
            self._wake.notify()

    def _run(self, broker: Broker) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._ending)
                if not self._waiting:
                    return
                change = self._waiting.popleft()
            if not _write(broker, change):
                with self._wake:
                    if self._ending:
                        return
                    if len(self._waiting) < KEPT:
                        self._waiting.appendleft(change)
                    self._wake.wait(RETRY_S)


def _write(broker: Broker, change: Change) -> bool:
    event = Event(name="service", service=change.service, level=change.level, text=change.text, data={"by": NAME})
    try:
        broker.events.emit(event)
    except (TidemillError, redis.RedisError) as error:
        log.warning("cannot write a change into the timeline, retrying", service=change.service, error=str(error))
        return False
    return True
