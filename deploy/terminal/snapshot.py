"""What a person wants to know about a run at one moment, collected from the broker.

Looks at the run in a thread of its own, so that a broker that doesn't answer never stops the supervisor.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import redis
import structlog

from broker.client import Broker
from broker.flow.run_control import ControlState
from deploy.supervisor.events import NAME
from schemas.config import TidemillConfig
from schemas.errors import TidemillError

HISTORY = 240
"""Steps of history that are shown."""
EVENTS, SHOWN = 40, 8
"""Events that are read, and those of them that are shown: what the supervisor did is known here anyway."""
RATE_STEPS = 20
"""The time to go is estimated from so many of the last steps."""


@dataclass(frozen=True)
class Accuracy:
    """One evaluation on held-out prompts; ``done`` of ``n`` samples are in."""

    version: int
    mean: float
    done: int
    n: int

    @property
    def complete(self) -> bool:
        return self.n > 0 and self.done >= self.n


@dataclass(frozen=True)
class Replica:
    """One service. version: of its weights, -1 where it has none. silent_s: since its last sign of life."""

    name: str
    role: str
    state: str
    version: int = -1
    restarts: int = 0
    tokens_per_s: float = 0.0
    silent_s: float = 0.0


@dataclass(frozen=True)
class Notice:
    """Something that happened. time: Unix seconds, 0 when unknown."""

    service: str
    text: str
    level: str = "info"
    time: float = 0.0


@dataclass(frozen=True)
class RunSnapshot:
    """One look at a run. Histories are oldest first; rates are tokens per second; times are seconds.

    control: what people asked for, None before the broker was asked.
    """

    run: str
    steps: int
    staleness_bound: int
    state: str = "starting"
    paused: bool = False
    broker_answers: bool = True
    step: int = 0
    version: int = 0
    elapsed_s: float = 0.0
    remaining_s: float | None = None
    rewards: list[float] = field(default_factory=list)
    accuracies: list[Accuracy] = field(default_factory=list)
    staleness_mean: float = 0.0
    staleness_max: int = 0
    generated_per_s: float = 0.0
    trained_per_s: float = 0.0
    active: int = 0
    capacity: int = 0
    groups_trained: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, int] = field(default_factory=dict)
    lags: Mapping[str, int] = field(default_factory=dict)
    replicas: list[Replica] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    control: ControlState | None = None

    @property
    def complete_accuracies(self) -> list[Accuracy]:
        """Finished evaluations only."""
        return [accuracy for accuracy in self.accuracies if accuracy.complete]


def empty(config: TidemillConfig) -> RunSnapshot:
    """The snapshot of a run that nothing is known of yet."""
    return RunSnapshot(config.run.name, config.trainer.steps, config.flow.staleness, capacity=config.slots)


def collect(broker: Broker, config: TidemillConfig) -> RunSnapshot:
    """Ask the broker for everything; InfraError when it does not answer."""
    ledger = broker.ledger.state()
    metrics = broker.metrics.tail(HISTORY)
    beats = broker.services.list()
    last = metrics[-1] if metrics else {}
    now = time.time()
    replicas = [
        Replica(
            name=beat.service,
            role=beat.role,
            state=beat.state,
            version=beat.version,
            tokens_per_s=beat.figures.get("tokens_per_s", 0.0),
            silent_s=max(0.0, now - beat.time) if beat.time else 0.0,
        )
        for beat in beats
        if beat.role != "supervisor"
    ]
    return RunSnapshot(
        run=config.run.name,
        steps=config.trainer.steps,
        staleness_bound=config.flow.staleness,
        state=ledger.state,
        paused=ledger.paused,
        control=ledger.control,
        step=ledger.step,
        version=ledger.version,
        elapsed_s=max(0.0, now - ledger.started) if ledger.started else 0.0,
        remaining_s=remaining(metrics, config.trainer.steps),
        rewards=[float(line["reward/mean"]) for line in metrics if "reward/mean" in line],
        accuracies=[
            Accuracy(result.version, result.mean, result.scored + result.failed, result.n)
            for result in broker.evals.results()
        ],
        staleness_mean=float(last.get("staleness/mean", 0.0)),
        staleness_max=int(max((line.get("staleness/max", 0) for line in metrics), default=0)),
        generated_per_s=sum(r.tokens_per_s for r in replicas if r.role == "generator"),
        trained_per_s=sum(r.tokens_per_s for r in replicas if r.role == "trainer"),
        active=ledger.active,
        capacity=ledger.capacity or config.slots,
        groups_trained=ledger.trained,
        dropped=ledger.dropped,
        failed=ledger.failed,
        lags=broker.lags(),
        replicas=replicas,
        notices=_notices(broker),
    )


def _notices(broker: Broker) -> list[Notice]:
    """The newest events, without what the supervisor wrote there itself."""
    found = [noted for noted in broker.events.newest(EVENTS) if noted.event.data.get("by") != NAME]
    return [
        Notice(noted.event.service, noted.event.text or noted.event.name, noted.event.level, noted.time)
        for noted in found
    ][-SHOWN:]


def remaining(metrics: list[dict[str, Any]], steps: int) -> float | None:
    """Seconds to go at the pace of the last steps; None before there is a pace."""
    recent = [line for line in metrics[-RATE_STEPS:] if "wall_s" in line and "step" in line]
    if len(recent) < 2:
        return None
    done = recent[-1]["step"] - recent[0]["step"]
    passed = recent[-1]["wall_s"] - recent[0]["wall_s"]
    if done <= 0 or passed < 0:
        return None
    return float(max(0, steps - recent[-1]["step"]) * passed / done)


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
