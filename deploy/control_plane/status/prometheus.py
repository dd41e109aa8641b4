"""GET /metrics in Prometheus' text format: base units, no label that grows with the run."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from statistics import fmean
from typing import get_args

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from broker.connection.counters import CLOSED, COMMIT_SECONDS, COMMITS, DUPLICATE, FENCED, LEASES_EXPIRED
from broker.connection.keys import GENERATORS, REWARD
from schemas.control_api.base import RunState
from schemas.control_api.status import RunStatus
from schemas.messages.telemetry import QUARANTINED
from schemas.system.device_lock import PART, SHARE

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = get_args(RunState)
STREAM_FIGURES = (
    ("stream_lag_entries", "Entries that no service has read", "waiting"),
    ("stream_pending_entries", "Entries read and not done", "pending"),
    ("stream_length_entries", "Entries in the stream", "length"),
    ("oldest_pending_age_seconds", "Age of the oldest entry that waits or is pending", "oldest_s"),
)
STEP_TIMES = (
    ("step_wait_seconds", "the trainer waited for a batch", "wait"),
    ("weights_publish_seconds", "publishing weights took", "publish"),
    ("step_total_seconds", "the step took", "total"),
)
POOL_FIGURES = (
    ("pool_generators_live", "Generators of a pool with a recent heartbeat", "generators"),
    ("pool_tokens_per_second", "Tokens that a pool generates a second", "tokens_per_s"),
    ("pool_trained_share", "Share of the trained tokens that came from a pool", "trained_share"),
    ("pool_logprob_gap", "Mean difference of a pool's log-probabilities from the trainer's", "logprob_gap"),
)
MISMATCHES = (
    ("gap", "Largest mean difference of a generator's log-probabilities from the trainer's"),
    ("kl", "Largest divergence (k3) of a generator from the trainer"),
)
AGES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


@dataclass(eq=False)
class StatusMetrics(Collector):
    """The status as metrics. ages: loss tokens by their age in versions, counted since this process started."""

    status: RunStatus
    answers: bool
    ages: dict[int, int]
    times: dict[str, float]

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        yield from self._flow()
        yield from self._ends()
        yield from self._services()

    def _flow(self) -> Iterator[Metric]:
        s = self.status
        for name, text, figure in STREAM_FIGURES:
            yield _labelled(name, text, "stream", ((one.name, getattr(one, figure) or 0.0) for one in s.streams))
        yield _gauge("admission_outstanding", "Prompt groups that hold a slot", s.ledger.active)
        yield _gauge("admission_capacity", "Slots there are", s.ledger.capacity)
        yield _gauge("ledger_balanced", "Whether every admitted group is accounted for", s.ledger.balanced)
        yield _gauge("uncommitted_steps", "Steps that no checkpoint covers", s.ledger.uncommitted_steps)
        if s.memory_bytes is not None:
            yield _gauge("broker_memory_bytes", "Memory of the run in the broker", s.memory_bytes)
        yield _gauge("broker_up", "Whether the broker answers", self.answers)

    def _ends(self) -> Iterator[Metric]:
        s = self.status
        yield _counter("steps_total", "Optimizer steps", s.step)
        yield _counter("groups_admitted_total", "Prompt groups admitted", s.ledger.admitted)
        yield _counter("groups_trained_total", "Prompt groups trained", s.ledger.trained)
        for name, reasons in (("dropped", s.ledger.dropped), ("failed", s.ledger.failed)):
            yield _counters(f"groups_{name}", f"Prompt groups {name}", "reason", reasons)
        yield _labelled("tokens", "Generated tokens by what became of them", "end", s.ledger.tokens.items())
        seconds = CounterMetricFamily("tidemill_device_seconds", "Seconds of devices by use", labels=["role", "use"])
        for role, uses in s.ledger.devices.items():
            for use, spent in uses.items():
                seconds.add_metric([role, use], spent)
        yield seconds
        yield from self._mishaps()
        yield _counter("samples_trained_total", "Samples trained", s.ledger.samples_trained)
        yield _counter("tokens_generated_total", "Tokens generated", s.ledger.tokens_generated)
        yield _counter("dlq_total", "Dead letters", s.dead_letters)
        yield _gauge("policy_version", "Weight version in training", s.version)
        yield _gauge("leader_term", "Trainers that took over", s.leader_term)
        yield _gauge("staleness_bound_versions", "Bound on the age of a trained token", s.staleness.bound)
        if s.reward is not None:
            yield _gauge("reward_mean", "Mean reward of the last step", s.reward)
        if s.evaluation is not None and s.evaluation.mean is not None:
            yield _gauge("evaluation_mean", "Mean reward of the newest evaluation", s.evaluation.mean)
        for label, text, name in STEP_TIMES:
            if (value := self.times.get(name)) is not None:
                yield _gauge(label, f"How long {text}, last step", value)
        yield self._histogram()
        states = ((state, state == s.state) for state in STATES)
        yield _labelled("run_state", "1 for the state of the run", "state", states)
        yield _gauge("pause_waiting", "Services that have not followed the pause", len(s.pause.waiting_for))

    def _mishaps(self) -> Iterator[Metric]:
        told = self.status.counters
        published = {
            "ok": self.status.ledger.samples_published,
            "duplicate": told.get(f"{DUPLICATE}:publish", 0),
            "closed": told.get(CLOSED, 0),
        }
        yield _counters("publish_total", "Samples that generators handed over", "outcome", published)
        stages = {stage: told.get(f"{DUPLICATE}:{stage}", 0) for stage in ("publish", "score")}
        yield _counters("duplicate_total", "Results that were there already, and refused", "stage", stages)
        groups = {group: told.get(f"{LEASES_EXPIRED}:{group}", 0) for group in (GENERATORS, REWARD)}
        yield _counters("leases_expired_total", "Entries taken over from a silent worker", "group", groups)
        yield _counter("fenced_total", "Writes of replaced trainers, refused", told.get(FENCED, 0))
        yield SummaryMetricFamily(
            "tidemill_commit_seconds",
            "Acknowledging the steps that a checkpoint covers",
            count_value=int(told.get(COMMITS, 0)),
            sum_value=told.get(COMMIT_SECONDS, 0.0),
        )

    def _histogram(self) -> Metric:
        below = [sum(count for age, count in self.ages.items() if age <= edge) for edge in AGES]
        total = sum(self.ages.values())
        buckets = [(str(float(edge)), float(count)) for edge, count in zip(AGES, below, strict=True)]
        return HistogramMetricFamily(
            "tidemill_staleness_versions",
            "Age of trained tokens in weight versions",
            buckets=[*buckets, ("+Inf", float(total))],
            sum_value=float(sum(age * count for age, count in self.ages.items())),
        )

    def _services(self) -> Iterator[Metric]:
        live = [service for service in self.status.services if service.live]
        roles = sorted({service.role for service in live} | {"feeder", "generator", "reward", "trainer"})
        counts = ((role, sum(service.role == role for service in live)) for role in roles)
        yield _labelled("services_live", "Services with a recent heartbeat", "role", counts)
        count = sum(service.state == QUARANTINED for service in live)
        yield _gauge("generators_quarantined", "Generators whose log-probabilities are not those of the policy", count)
        for name, text in MISMATCHES:
            found = [one.figures[f"mismatch_{name}"] for one in live if f"mismatch_{name}" in one.figures]
            if found:
                yield _gauge(f"generators_mismatch_{name}_max", text, max(found))
        tokens = ((role, sum(x.tokens_per_s for x in live if x.role == role)) for role in ("generator", "trainer"))
        yield _labelled("tokens_per_second", "Tokens generated and trained a second", "role", tokens)
        shares = {x.role: [y.figures[SHARE] for y in live if y.role == x.role and SHARE in y.figures] for x in live}
        if any(shares.values()):
            means = ((role, fmean(found)) for role, found in sorted(shares.items()) if found)
            yield _labelled("shared_gpu_time_share", "Share of time with the GPUs that are shared", "role", means)
        parts: dict[str, list[float]] = {}
        for name, seconds in (each for one in live for each in one.figures.items() if each[0].startswith(PART)):
            parts.setdefault(name.removeprefix(PART), []).append(seconds)
        if parts:
            means = ((part, fmean(found)) for part, found in sorted(parts.items()))
            yield _labelled("hand_over_seconds", "Seconds of a part of the last hand-overs, the mean", "part", means)
        for name, text, figure in POOL_FIGURES if self.status.pools else ():
            values = ((pool.name, getattr(pool, figure)) for pool in self.status.pools)
            yield _labelled(name, text, "pool", ((pool, value) for pool, value in values if value is not None))
        yield InfoMetricFamily("tidemill_build", "This release", {"version": version("tidemill")})


def render(status: RunStatus, answers: bool, ages: dict[int, int], times: dict[str, float]) -> bytes:
    """Return the page that Prometheus reads."""
    return generate_latest(StatusMetrics(status, answers, ages, times))


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"tidemill_{name}", text, value=float(value))


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"tidemill_{name}", text, value=float(value))


def _counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"tidemill_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], float(value))
    return family


def _labelled(name: str, text: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
    family = GaugeMetricFamily(f"tidemill_{name}", text, labels=[label])
    for key, value in values:
        family.add_metric([key], float(value))
    return family
