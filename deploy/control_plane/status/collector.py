"""The status of a run, collected in four round trips to the broker: everything that GET /v1/status says."""

from __future__ import annotations

import re
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from broker.client import Broker
from broker.evaluations.results import EvalResult
from broker.flow.ledger import LedgerState
from broker.flow.run_control import ControlState
from broker.telemetry.heartbeats import FORGOTTEN_S
from broker.telemetry.stream_lag import StreamLag, read_stream_lags
from deploy.control_plane.status.bottleneck import Evidence, find_bottleneck
from deploy.control_plane.status.pools import pool_statuses
from deploy.control_plane.status.run_state import LOADING, is_live, missing_roles, pause_status, run_state
from deploy.control_plane.status.scaling import scaling
from deploy.control_plane.status.series import HISTOGRAM, STEPS_KEPT, MetricsSeries, Rates
from deploy.planning.cluster import DeviceQuota
from schemas.config import TidemillConfig
from schemas.config.agents import LiveConfig
from schemas.control_api.base import OVER, RunState
from schemas.control_api.orders import Settings, SettingsChange
from schemas.control_api.status import (
    EvaluationStatus,
    LedgerStatus,
    RunStatus,
    ServiceStatus,
    Staleness,
    StreamStatus,
    Throughput,
)
from schemas.messages import Heartbeat
from schemas.model_folder import chat_template
from schemas.urls import is_loopback

MEMORY_EVERY_S = 10.0
RECENT = 20
"""Steps that metrics of "now" are taken from."""
FEW_BATCHES = 4
"""Batches of dropped groups before the first step from which their reasons are worth naming."""
STOPPED = 10
"""A step that took so many times the median was not worked on all the time."""
ROLES = ("supervisor", "node", "control", "feeder", "generator", "reward", "trainer")
MISMATCH = ("gap", "kl")
"""Of a generator's log-probabilities from the trainer's, in the newest step that trained tokens of it."""
METRICS_AT_ONCE = 1000


@dataclass(frozen=True)
class PlannedRun:
    """The part of the configuration that the control plane needs; 0 or empty if a value is not known.

    has_accuracy: whether evaluations have an accuracy and not only a reward. playground: whether users may ask the
    policy. chat: whether its model has a chat template. live: conversations of users. quota: of devices.
    """

    run: str
    steps: int = 0
    staleness: int = 0
    batch: int = 0
    max_samples: int = 0
    pools: Sequence[str] = ()
    n: int = 1
    scale_hint: str = ""
    folder: Path = Path()
    model: str = ""
    held_out: bool = False
    has_accuracy: bool = False
    playground: bool = False
    chat: bool = False
    live: LiveConfig = field(default_factory=LiveConfig)
    quota: DeviceQuota = field(default_factory=DeviceQuota)

    @classmethod
    def of(cls, config: TidemillConfig) -> PlannedRun:
        """Take the values from the configuration."""
        control = config.control
        return cls(
            run=config.run.name,
            steps=config.trainer.steps,
            staleness=config.flow.staleness,
            batch=config.trainer.batch_groups,
            max_samples=config.generator.max_samples,
            pools=tuple(config.pools),
            n=config.sampling.n,
            scale_hint=control.scale_hint or "",
            folder=config.folder,
            model=config.model.path,
            held_out=config.eval is not None,
            has_accuracy=config.has_accuracy,
            live=config.generator.agents.live,
            quota=DeviceQuota.of(config),
            playground=is_loopback(control.host) if control.playground is None else control.playground,
            chat=chat_template(Path(config.model.path).expanduser()) is not None,
        )


class Collector:
    """Collects the status of a run again and again, and keeps the metrics that it has read. Used by one thread."""

    def __init__(
        self, broker: Broker, plan: PlannedRun, measure_memory: bool = True, keep_steps: int = STEPS_KEPT
    ) -> None:
        """measure_memory: whether ``memory_bytes`` is read, which asks for the size of every key of the run.

        keep_steps: the newest steps whose metrics are kept, RECENT at least.
        """
        self._broker = broker
        self._plan = plan
        self._measure_memory = measure_memory
        self._rates = Rates()
        self._surplus: dict[str, int] = {}
        self._memory: int | None = None
        self._memory_due = 0.0
        self._metrics_id = "0-0"
        self._versions: dict[str, int] = {}
        self._loads: deque[float] = deque(maxlen=RECENT)
        self.history = MetricsSeries(keep_steps)
        self.ages: Counter[int] = Counter()
        """Loss tokens by age, of all steps that were read."""
        self.control: ControlState | None = None
        """The users' orders, as last read; None before the first reading."""
        self.evaluations: list[EvaluationStatus] = []
        """All evaluations, by version, as they were last read."""

    def read(self) -> RunStatus:
        """Read the status of the run; InfraError when the broker does not answer."""
        broker = self._broker
        ledger = broker.ledger.read_state()
        lags = read_stream_lags(broker.connection, self._surplus)
        known = broker.heartbeats.list()
        results = broker.evals.read_results()
        now = broker.heartbeats.read_clock()
        beats = [beat for beat in known if now - beat.time < FORGOTTEN_S]
        self._follow_metrics()
        if self._measure_memory and time.monotonic() >= self._memory_due:
            self._memory = broker.measure_memory()
            self._memory_due = time.monotonic() + MEMORY_EVERY_S
        self._rates.add(now, _counts(ledger, lags))
        self._follow_loads(beats)
        self.control = ledger.control
        self.evaluations = [evaluation(result, self._plan.has_accuracy) for result in results]
        return self._status(ledger, lags, beats, now)

    def _follow_loads(self, beats: Sequence[Heartbeat]) -> None:
        """Note the pauses of generators for new versions; the mean of several counts, since one says little."""
        for beat in beats:
            if beat.role == "generator" and beat.version > self._versions.get(beat.service, beat.version):
                self._loads.append(beat.figures.get("update_pause_s", 0.0))
        self._versions = {beat.service: beat.version for beat in beats}

    def _follow_metrics(self) -> None:
        while True:
            self._metrics_id, lines = self._broker.metrics.read_after(self._metrics_id, METRICS_AT_ONCE)
            for line in lines:
                self.history.add(line)
                counts = line.get(HISTOGRAM)
                if isinstance(counts, dict):
                    self.ages.update({int(age): int(count) for age, count in counts.items()})
            if len(lines) < METRICS_AT_ONCE:
                return

    def _status(
        self, ledger: LedgerState, lags: Sequence[StreamLag], beats: Sequence[Heartbeat], now: float
    ) -> RunStatus:
        orders, history, rates = ledger.control, self.history, self._rates
        pause = pause_status(orders, beats, lags, now)
        state, cause = run_state(ledger, pause, beats, now)
        services = [self._service(beat, orders, now) for beat in beats]
        rank = {role: number for number, role in enumerate(ROLES)}
        services.sort(key=lambda service: (rank.get(service.role, len(ROLES)), natural(service.name)))
        pools = list(dict.fromkeys([*self._plan.pools, *(one.pool for one in services if one.pool)]))
        complete = [one for one in self.evaluations if one.complete and one.n]
        steps = ledger.steps or self._plan.steps
        return RunStatus.of(
            ledger,
            run=self._plan.run,
            state=state,
            cause=cause,
            time=now,
            started=ledger.started or None,
            elapsed_s=max(0.0, now - ledger.started) if ledger.started else 0.0,
            remaining_s=None if state in OVER else self._remaining(steps),
            steps=steps,
            reward=next(iter(history.last("reward/mean")), None),
            evaluation=complete[-1] if complete else None,
            pause=pause,
            bottleneck=find_bottleneck(self._evidence(state, cause, ledger, lags, beats, now)),
            throughput=Throughput(
                generated_tokens=_sum(services, "generator"),
                trained_tokens=_sum(services, "trainer"),
                admitted_groups=rates.of("admitted"),
                published_samples=rates.of("published"),
                scored_samples=rates.of("scored"),
                trained_samples=rates.of("samples_trained"),
                steps_per_minute=None if (rate := rates.of("step")) is None else rate * 60,
            ),
            staleness=self._staleness(ledger),
            ledger=LedgerStatus.of(ledger, tokens={**ledger.tokens, "in_flight": ledger.tokens_in_flight}),
            streams=[self._stream(lag, now) for lag in lags],
            services=services,
            pools=pool_statuses(pools, services, history, RECENT),
            settings=Settings.model_validate(
                {name: ledger.settings.get(name) for name in SettingsChange.model_fields}
                | {
                    "staleness": ledger.staleness if ledger.leader_term else self._plan.staleness,
                    "batch": ledger.batch or self._plan.batch,
                    "steps": steps,
                    "changed": sorted(ledger.settings),
                }
            ),
            scaling=scaling(orders, services, self._plan.scale_hint, pools, self._plan.quota.most),
            memory_bytes=self._memory,
        )

    def _service(self, beat: Heartbeat, orders: ControlState, now: float) -> ServiceStatus:
        figures = {name: value for name, value in beat.figures.items() if name != "tokens_per_s"}
        for name in MISMATCH if beat.role == "generator" else ():
            if newest := self.history.last(f"mismatch/{beat.service}/{name}"):
                figures[f"mismatch_{name}"] = newest[0]
        live = is_live(beat, now)
        in_flight = beat.figures.get("samples_in_flight")
        most = beat.figures.get("max_samples") or self._plan.max_samples
        return ServiceStatus.of(
            beat,
            name=beat.service,
            state=beat.state if live else "lost",
            version=beat.version if beat.version >= 0 else None,
            silent_s=round(max(0.0, now - beat.time), 2),
            live=live,
            paused=orders.pause != "none" and beat.acknowledged.get("pause") == orders.pause_id,
            tokens_per_s=round(beat.figures.get("tokens_per_s", 0.0), 1),
            load=None if in_flight is None or not most else min(1.0, in_flight / most),
            figures=figures,
        )

    def _stream(self, lag: StreamLag, now: float) -> StreamStatus:
        oldest_s = None if lag.oldest is None else round(max(0.0, now - lag.oldest), 2)
        return StreamStatus.of(lag, oldest_s=oldest_s, rate=self._rates.of(lag.name))

    def _staleness(self, ledger: LedgerState) -> Staleness:
        means, most = self.history.last("staleness/mean", RECENT), self.history.last("staleness/max", RECENT)
        histogram: Counter[str] = Counter()
        for counts in self.history.histograms[-RECENT:]:
            histogram.update(counts)
        return Staleness(
            bound=ledger.staleness if ledger.leader_term else self._plan.staleness,
            mean=sum(means) / len(means) if means else None,
            max=int(max(most)) if most else None,
            histogram=dict(sorted(histogram.items(), key=lambda pair: int(pair[0]))),
            steps=len(means),
        )

    def _remaining(self, steps: int) -> float | None:
        recent = self.history.since(0, RECENT, {"wall_s", "time/paused_s"})
        walls = recent.series.get("wall_s", [None] * len(recent.step))
        paused = recent.series.get("time/paused_s", [None] * len(recent.step))
        took = []
        for before, now in pairwise(zip(recent.step, walls, paused, strict=True)):
            if before[1] is not None and now[1] is not None and now[1] >= before[1]:
                # Less than nothing where the clock was set back.
                took.append((now[1] - before[1] - (now[2] or 0.0)) / (now[0] - before[0]))
        took = [seconds for seconds in took if seconds >= 0]
        if not took:
            return None
        working = [seconds for seconds in took if seconds <= STOPPED * median(took)]
        return max(0, steps - recent.step[-1]) * sum(working) / len(working)

    def _filtered(self, ledger: LedgerState) -> float | None:
        """Return the share of groups that equal rewards dropped: in the last steps, or of all before there is one."""
        if came := sum(self.history.last("groups/complete", RECENT)):
            return min(1.0, sum(self.history.last("groups/dropped_zero_variance", RECENT)) / came)
        dropped = sum(ledger.dropped.values())
        if dropped < FEW_BATCHES * (ledger.batch or 1):
            return None
        return ledger.dropped.get("zero_variance", 0) / dropped

    def _evidence(
        self,
        state: RunState,
        cause: str,
        ledger: LedgerState,
        lags: Sequence[StreamLag],
        beats: Sequence[Heartbeat],
        now: float,
    ) -> Evidence:
        live = [beat for beat in beats if is_live(beat, now)]
        totals = self.history.last("time/total_s", RECENT)
        total = sum(totals)
        stream = {lag.name: lag for lag in lags}
        generators = [beat for beat in live if beat.role == "generator"]
        places = sum(beat.figures.get("max_samples", self._plan.max_samples) for beat in generators)
        taken = sum(beat.figures.get("samples_in_flight", 0.0) for beat in generators)
        pause = sum(self._loads) / len(self._loads) if self._loads else 0.0

        def share(name: str) -> float | None:
            return sum(self.history.last(f"time/{name}_s", RECENT)) / total if total else None

        return Evidence(
            state=state,
            cause=cause,
            begun=ledger.leader_term > 0,
            loading=[beat.service for beat in live if beat.state in LOADING],
            missing=missing_roles(live),
            active=ledger.active,
            capacity=ledger.capacity,
            wait=share("wait"),
            publish=share("publish"),
            update=min(1.0, pause * len(totals) / total) if total else None,
            unscored=stream["trajectories"].waiting + stream["trajectories"].pending,
            unclaimed=stream["tasks"].waiting,
            step_samples=(ledger.batch or 1) * self._plan.n,
            load=min(1.0, taken / places) if places else None,
            filtered=self._filtered(ledger),
            generated_per_s=sum(beat.figures.get("tokens_per_s", 0.0) for beat in generators),
            trained_per_s=sum(beat.figures.get("tokens_per_s", 0.0) for beat in live if beat.role == "trainer"),
            evaluating=_under_way(self.evaluations),
            hand_over=share("hand_over"),
        )


def evaluation(result: EvalResult, has_accuracy: bool) -> EvaluationStatus:
    """Return an evaluation as the API shows it."""
    mean, accuracy = result.mean if result.scored else None, result.accuracy if has_accuracy else None
    return EvaluationStatus.of(result, mean=mean, accuracy=accuracy, time=result.time or None)


def _under_way(evaluations: Sequence[EvaluationStatus]) -> str:
    if not evaluations or (newest := evaluations[-1]).complete:
        return ""
    return f"version {newest.version} ({newest.scored + newest.failed:,} of {newest.n:,} samples)"


def _counts(ledger: LedgerState, lags: Sequence[StreamLag]) -> dict[str, int]:
    return {lag.name: lag.entered for lag in lags} | {
        "admitted": ledger.admitted,
        "published": ledger.samples_published,
        "samples_trained": ledger.samples_trained,
        "step": ledger.step,
    }


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which generator-2 comes before generator-10."""
    return [
        (int(part), "") if part.isascii() and part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name)
    ]


def _sum(services: Sequence[ServiceStatus], role: str) -> float:
    return round(sum(service.tokens_per_s for service in services if service.role == role and service.live), 1)
