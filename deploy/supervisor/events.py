"""Tells the run's timeline what the supervisor did, so that whoever looks from elsewhere sees it, too.

A thread writes: a broker that does not answer holds nothing up. It is tried again until it does; of many notices that
wait the oldest go first.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType
from typing import Self

import redis
import structlog

from broker.client import Broker
from deploy.supervisor.supervisor import Change
from schemas.errors import TidemillError
from schemas.messages import Event

NAME = "supervisor"
"""``data["by"]`` of these events."""
KEPT = 200
RETRY_S = 1.0
END_S = 2.0
"""How long the last notices may take at the end."""

log = structlog.get_logger()


class Notices:
    """``put`` at any time, also before there is a broker; used as a context manager it writes what there is.

    ::

        notices = Notices()
        notices.put(Change("broker", "started"))
        with notices.to(broker): ...
    """

    def __init__(self) -> None:
        self._waiting: deque[Change] = deque(maxlen=KEPT)
        self._broker: Broker | None = None
        self._wake = threading.Condition()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="notices", daemon=True)

    def to(self, broker: Broker) -> Self:
        """Where they go."""
        self._broker = broker
        return self

    def put(self, change: Change) -> None:
        """Note one; never waits for the broker."""
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
            log.warning("a notice is not in the timeline yet", service=change.service, error=str(error))
            return False
