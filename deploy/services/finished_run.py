"""Ends a service whose run is finished, which would else hold its GPU for ever.

Who supervises services ends them; those that were started one by one, by hand, by Slurm or as containers, end
themselves with exit code 0.
"""

import os
import signal
import threading
import time
from dataclasses import dataclass

import redis
import structlog

from broker.connection.connection import Connection, find_url
from broker.connection.keys import Keys
from broker.flow.run_control import RunControl
from schemas.config import TidemillConfig
from schemas.errors import TidemillError
from schemas.run_record import read_record

LOOK_S = 2.0
SETTLED_S = 10.0
"""Seconds for which a run must have been finished; a run that gets more steps within them keeps its services."""
DEADLINE_S = 5.0

log = structlog.get_logger()


@dataclass
class FinishedRun:
    """Whether a run is over for a service: a pure state machine. steps: what the service's configuration asks for.

    A run that had finished before the service started may resume: it is over only once all ``steps`` are taken.
    """

    steps: int
    _since: float | None = None
    _seen_unfinished: bool = False

    def is_over(self, finished_steps: int | None, now: float) -> bool:
        """finished_steps: None while the run is not finished. now: seconds on a clock that only grows."""
        if finished_steps is None:
            self._since, self._seen_unfinished = None, True
            return False
        if not self._seen_unfinished and finished_steps < self.steps:
            return False
        return self.is_over_unheard(now, first=now)

    def is_over_unheard(self, now: float, first: float | None = None) -> bool:
        """Return the same while the broker does not answer: it may have ended with the run."""
        self._since = first if self._since is None else self._since
        return self._since is not None and now - self._since >= SETTLED_S


class FinishedRunWatch:
    """A thread that asks this very process to end, as SIGTERM does, once its run is over."""

    def __init__(self, config: TidemillConfig) -> None:
        self._config = config
        self._run_control: RunControl | None = None
        self._run = FinishedRun(config.trainer.steps)

    def finished_before(self) -> bool:
        """Return whether the run has taken all its steps, so that no service needs to start; False if unknown."""
        try:
            finished = self._look()
        except (TidemillError, redis.RedisError):
            return False
        self._run.is_over(finished, time.monotonic())
        return finished is not None and finished >= self._config.trainer.steps

    def start(self) -> None:
        """Start the watching thread."""
        threading.Thread(target=self._watch, name="finished run", daemon=True).start()

    def _watch(self) -> None:
        while not self._is_over() or signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            # One that is still loading its libraries does not know yet how to end well.
            time.sleep(LOOK_S)
        log.info("the run is finished, this service ends: --stay keeps it", run=self._config.run.name)
        os.kill(os.getpid(), signal.SIGTERM)

    def _is_over(self) -> bool:
        try:
            return self._run.is_over(self._look(), time.monotonic())
        except (TidemillError, redis.RedisError):
            return self._run.is_over_unheard(time.monotonic())

    def _look(self) -> int | None:
        if self._run_control is None:
            settings = self._config.broker
            if (url := find_url(settings.url)) is None:
                return None
            self._run_control = RunControl(Connection(url, Keys(settings.prefix, self._config.run.name), DEADLINE_S))
        if (steps := self._run_control.read_finished_steps()) is None:
            return None
        run_id, record = self._run_control.read_run()[0], read_record(self._config.folder)
        # The broker's run of this name may be another than the one in this service's folder.
        return None if record is not None and run_id not in ("", record.id) else steps
