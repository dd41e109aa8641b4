"""Polls the status of a run for all who ask: the control plane's pages, and the terminal of ``tidemill up``."""

import threading
import time
from collections.abc import Callable

import redis
import structlog

from broker.client import Broker
from broker.flow.run_control import ControlState
from broker.telemetry.events import StoredEvent
from deploy.control_plane.status.collector import Collector, PlannedRun
from deploy.control_plane.status.kubernetes import Deployments
from deploy.control_plane.status.prometheus import render
from deploy.control_plane.status.series import STEPS_KEPT, ThroughputSeries
from schemas.control_api.history import MetricsHistory, ThroughputHistory
from schemas.control_api.status import Bottleneck, EvaluationStatus, RunStatus
from schemas.errors import InfraError, TidemillError

EVERY_S = 1.0
EVENTS_AT_ONCE = 200
REWARDS = 240

log = structlog.get_logger()


class StatusPoller:
    """Poller of a run's status in two threads: one reads the status, one follows the timeline.

    They call on_status, on_metrics and on_events with what is new. ``latest`` is the newest status; ``control``,
    ``evaluations`` and ``rewards`` were read with it. Reading these attributes never waits for the broker; ``refresh``,
    ``history``, ``throughput`` and ``metrics`` may wait for one reading.
    """

    def __init__(
        self,
        broker: Broker,
        plan: PlannedRun,
        deployments: Deployments | None = None,
        every_s: float = EVERY_S,
        measure_memory: bool = True,
        keep_steps: int = STEPS_KEPT,
    ) -> None:
        """deployments: who scales, on Kubernetes. measure_memory, keep_steps: see Collector.

        every_s: pause between two looks, and how long the end may wait for a read of the timeline.
        """
        self._broker = broker
        self.deployments = deployments
        self._every_s = every_s
        self._collector = Collector(broker, plan, measure_memory, keep_steps)
        self._pace = ThroughputSeries()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._latest: RunStatus | None = None
        self._answer = b""
        self.control: ControlState | None = None
        """The users' orders; None before the first reading."""
        self.evaluations: list[EvaluationStatus] = []
        """All evaluations on held-out prompts, by version."""
        self.rewards: list[float] = []
        """Mean reward of each of the last REWARDS steps, oldest first."""
        self.error = "the broker has not been asked yet"
        self.started = False
        """Whether the broker has ever answered."""
        self.ticked = time.monotonic()
        """When the reading thread last came round, for the probe of life."""
        self.on_status: Callable[[bytes], None] = lambda body: None
        self.on_look: Callable[[RunStatus], None] = lambda status: None
        """Called by the reading thread after each look, with the newest status."""
        self.on_metrics: Callable[[MetricsHistory], None] = lambda lines: None
        self.on_events: Callable[[list[StoredEvent]], None] = lambda events: None
        self._threads = [
            threading.Thread(target=self._read, name="status", daemon=True),
            threading.Thread(target=self._follow, name="timeline", daemon=True),
        ]

    def start(self) -> None:
        """Start the threads that ask the broker, and on Kubernetes the one that asks for numbers of replicas."""
        for thread in self._threads:
            thread.start()
        if self.deployments is not None:
            self.deployments.start()

    def stop(self) -> None:
        """End the threads; they are daemons and may hang on a broker that is gone."""
        self._stop.set()
        for thread in self._threads:
            thread.join(2.0)
        if self.deployments is not None:
            self.deployments.stop()

    @property
    def latest(self) -> RunStatus:
        """The newest look at the run; InfraError before the first."""
        if self._latest is None:
            raise InfraError(self.error)
        return self._latest

    @property
    def answer(self) -> bytes:
        """``latest`` as JSON."""
        if not self._answer:
            raise InfraError(self.error)
        return self._answer

    def refresh(self) -> RunStatus:
        """Read the status now, from any thread; InfraError when the broker does not answer."""
        with self._lock:
            last = next(reversed(self._collector.history.steps), -1)
            status = self._collector.read()
            if self.deployments is not None and not status.scaling.possible:
                status = status.model_copy(update={"scaling": self.deployments.scaling})
            new = self._collector.history.since(last, EVENTS_AT_ONCE)
            self._pace.add(status)
            self.control = self._collector.control
            self.evaluations = self._collector.evaluations
            self.rewards = self._collector.history.last("reward/mean", REWARDS)
            self._keep(status)
            self.error, self.started = "", True
        if new.step:
            self.on_metrics(new)
        return status

    def history(self, cursor: int | None, limit: int, newest: bool, names: set[str] | None) -> MetricsHistory:
        """Return a page of step metrics as columns."""
        with self._lock:
            return self._collector.history.history(cursor, limit, newest, names)

    def throughput(self) -> ThroughputHistory:
        """Return tokens per second over the last minutes."""
        with self._lock:
            return self._pace.history()

    def metrics(self) -> bytes:
        """Return the run for Prometheus; InfraError before the first look."""
        with self._lock:
            history = self._collector.history
            names = ("wait", "publish", "total")
            times = {name: values[0] for name in names if (values := history.last(f"time/{name}_s"))}
            return render(self.latest, not self.error, dict(self._collector.ages), times)

    def _keep(self, status: RunStatus) -> None:
        self._latest = status
        self._answer = status.model_dump_json().encode()
        self.on_status(self._answer)

    def _read(self) -> None:
        while not self._stop.is_set():
            self.ticked = time.monotonic()
            try:
                self.refresh()
            except (TidemillError, redis.RedisError) as error:
                self._lost(str(error))
            if self._latest is not None:
                self.on_look(self._latest)
            self._stop.wait(self._every_s)

    def _lost(self, error: str) -> None:
        self.error = " ".join(error.split())
        log.warning("cannot look at the run", error=self.error)
        if self._latest is not None:
            self._keep(unreachable(self._latest, self.error))

    def _follow(self) -> None:
        position: str | None = None
        while not self._stop.is_set():
            try:
                if position is None:
                    newest = self._broker.events.newest(1)
                    position = newest[-1].id if newest else "0-0"
                events = self._broker.events.read_after(position, EVENTS_AT_ONCE, int(1000 * self._every_s))
            except (TidemillError, redis.RedisError) as error:
                log.warning("cannot follow the timeline", error=str(error))
                self._stop.wait(1.0)
                continue
            if events:
                position = events[-1].id
                self.on_events(events)


class DirectStatus(StatusPoller):
    """A poller without threads: each request reads the status."""

    @property
    def latest(self) -> RunStatus:
        return self.refresh()

    @property
    def answer(self) -> bytes:
        return self.refresh().model_dump_json().encode()


def unreachable(status: RunStatus, cause: str) -> RunStatus:
    """Return the last look at a run whose broker does not answer, marked as such."""
    said = Bottleneck(limit="broker", text="The broker does not answer: what follows is the last look.", figures={})
    return status.model_copy(update={"state": "unreachable", "cause": cause, "bottleneck": said})
