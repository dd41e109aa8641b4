"""Looks at the run in a thread of its own, so that a broker that doesn't answer never stops the supervisor."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import TracebackType
from typing import Self

import redis
import structlog

from broker.client import Broker
from deploy.snapshot import RunSnapshot, collect, empty
from schemas.config import TidemillConfig
from schemas.errors import TidemillError

EVERY_S = 0.5
QUIET_S = 3.0
"""A look that takes longer than this shows the last one, marked as waiting for the broker."""

log = structlog.get_logger()


class Watcher:
    """``latest`` is the newest snapshot, None before the first one."""

    def __init__(self, broker: Broker, config: TidemillConfig) -> None:
        self._broker = broker
        self._config = config
        self._latest: RunSnapshot | None = None
        self._answered = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    @property
    def latest(self) -> RunSnapshot | None:
        """The newest look at the run; ``broker_answers`` tells whether it is a current one."""
        if self._latest is None:
            return None
        return self._latest if self._answered.is_set() else replace(self._latest, broker_answers=False)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Not joined for long: it may hang on a broker that is gone, and dies with the process.
        self._stop.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._stop.is_set():
            doubt = threading.Timer(QUIET_S, self._answered.clear)
            doubt.daemon = True
            doubt.start()
            try:
                self._latest = collect(self._broker, self._config)
                self._answered.set()
            except (TidemillError, redis.RedisError) as error:
                self._latest = self._latest or empty(self._config)
                self._answered.clear()
                log.warning("cannot look at the run", error=str(error))
            finally:
                doubt.cancel()
            self._stop.wait(EVERY_S)
