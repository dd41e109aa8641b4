"""Writes what the supervisor did into the run's timeline, for people who look at the run from elsewhere.

A thread writes, so that a broker which does not answer holds nothing up. The thread tries again until the broker
answers; when too many changes wait, the oldest are forgotten first.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType
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
"""How long the last changes may take at the end."""

log = structlog.get_logger()


class TimelineWriter:
    """Changes are ``put`` at any time, also before there is a broker; a context manager that writes all of them.

    ::

        timeline = TimelineWriter()
        timeline.put(Change("broker", "started"))
        with timeline.to(broker): ...
    """

    def __init__(self) -> None:
        self._waiting: deque[Change] = deque(maxlen=KEPT)
        self._broker: Broker | None = None
        self._wake = threading.Condition()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="timeline", daemon=True)

    def to(self, broker: Broker) -> Self:
        """Name the broker that the changes go to."""
        self._broker = broker
        return self

    def put(self, change: Change) -> None:
        """Keep a change until it is written; never waits for the broker."""
        with self._wake:
            self._waiting.append(change)
            self._wake.notify()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._wake:
            self._ending = True
            self._wake.notify()
        # It may hang on a broker that is gone, and dies with the process.
        self._thread.join(END_S)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._waiting and not self._ending:
                    self._wake.wait()
                if not self._waiting:
                    return
                change = self._waiting.popleft()
            if not self._write(change):
                with self._wake:
                    if self._ending:
                        return
                    if len(self._waiting) < KEPT:
                        self._waiting.appendleft(change)
                    self._wake.wait(RETRY_S)

    def _write(self, change: Change) -> bool:
        event = Event(name="service", service=change.service, level=change.level, text=change.text, data={"by": NAME})
        try:
            if self._broker is not None:
                self._broker.events.emit(event)
            return self._broker is not None
        except (TidemillError, redis.RedisError) as error:
            log.warning("a change is not in the timeline yet", service=change.service, error=str(error))
            return False
