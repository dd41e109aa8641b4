"""Alerts of a run: a state machine over its status and the time, with the rules of deploy/observability/alerts.yaml."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from deploy.control_plane.status.pools import differences
from schemas.control_api.status import RunStatus
from schemas.messages.telemetry import QUARANTINED

AlertLevel = Literal["warning", "error"]
STUCK = "no_progress"
ROLES = ("feeder", "generator", "reward", "trainer")
WORKING = ("starting", "running")
OLD_WORK_S = 600.0
WINDOW_S = 600.0
"""Seconds over which faults are counted."""
MOST_LETTERS = 10
MOST_LEASES = 100
HOLD_S: Mapping[str, float] = {
    "broker_silent": 60,
    "ledger_leaks": 60,
    "service_missing": 120,
    "old_work": 300,
    "pause_stuck": 300,
}
"""Seconds for which a condition must hold before its alert fires; others fire at once."""


@dataclass(frozen=True)
class Alert:
    """A condition that holds now. level: error if the run does not recover by itself."""

    name: str
    level: AlertLevel
    text: str


class AlertRules:
    """Feed it every status; it answers which alerts have changed. ``active``: those that have fired, by name."""

    def __init__(self, stuck_s: float, active: Mapping[str, Alert] | None = None) -> None:
        """stuck_s: without a step for so long the run is stuck. active: alerts that have fired before."""
        self._stuck_s = stuck_s
        self._since: dict[str, float] = {}
        self._step = (-1, 0.0)
        self._counts: deque[tuple[float, int, float, float]] = deque()
        self.active: dict[str, Alert] = dict(active or {})

    def observe(self, status: RunStatus, now: float) -> list[tuple[Alert, bool]]:
        """Return the alerts that fire or end with this status, and whether each fires. now: Unix seconds."""
        holding = {alert.name: alert for alert in self._conditions(status, now)}
        changes = []
        for name, alert in holding.items():
            since = self._since.setdefault(name, now)
            if name not in self.active and now - since >= HOLD_S.get(name, 0.0):
                self.active[name] = alert
                changes.append((alert, True))
        for name in [name for name in self._since if name not in holding]:
            del self._since[name]
        for name in [name for name in self.active if name not in holding]:
            changes.append((self.active.pop(name), False))
        return changes

    def _conditions(self, status: RunStatus, now: float) -> Iterator[Alert]:
        if status.state == "unreachable":
            # Everything else is as it was.
            yield Alert("broker_silent", "error", f"the broker does not answer: {status.cause}")
            yield from (alert for alert in self.active.values() if alert.name != "broker_silent")
            return
        if status.state == "failed":
            yield Alert("run_failed", "error", f"the run has failed: {status.cause or 'no cause is known'}")
        if not status.ledger.balanced:
            yield Alert("ledger_leaks", "error", "prompt groups are not all accounted for: slots leak")
        yield from self._progress(status, now)
        if status.state in WORKING:
            live = {service.role for service in status.services if service.live}
            if missing := [role for role in ROLES if role not in live]:
                yield Alert("service_missing", "error", f"no {' and no '.join(missing)} is alive")
        if status.state == "running":
            work = [stream for stream in status.streams if stream.name in ("tasks", "trajectories")]
            if old := [stream.name for stream in work if (stream.oldest_s or 0) > OLD_WORK_S]:
                text = f"an entry of {' and '.join(old)} has been waiting for more than {OLD_WORK_S / 60:.0f} minutes"
                yield Alert("old_work", "warning", text)
        if names := [service.name for service in status.services if service.live and service.state == QUARANTINED]:
            text = f"{', '.join(names)}: log-probabilities are not those of the policy; see the event mismatch"
            yield Alert("mismatch", "error", f"{text}, then restart or remove it")
        if unequal := differences(status.services):
            yield Alert("unequal_generators", "warning", "; ".join(unequal))
        if status.pause.waiting_for:
            text = f"a pause was ordered, and these have not followed: {', '.join(status.pause.waiting_for)}"
            yield Alert("pause_stuck", "warning", text)
        yield from self._faults(status, now)

    def _progress(self, status: RunStatus, now: float) -> Iterator[Alert]:
        if status.step != self._step[0] or status.state not in WORKING:
            self._step = (status.step, now)
        silent = now - self._step[1]
        if silent >= self._stuck_s:
            text = f"no step for {silent / 60:.0f} minutes, at step {status.step}: {status.bottleneck.text}"
            yield Alert(STUCK, "error", text)

    def _faults(self, status: RunStatus, now: float) -> Iterator[Alert]:
        expired = sum(count for name, count in status.counters.items() if name.startswith("leases_expired:"))
        fenced = status.counters.get("fenced", 0.0)
        self._counts.append((now, status.dead_letters, expired, fenced))
        while len(self._counts) > 1 and now - self._counts[0][0] > WINDOW_S:
            self._counts.popleft()
        _, letters, leases, replaced = self._counts[0]
        minutes = f"in the last {WINDOW_S / 60:.0f} minutes"
        if (new := status.dead_letters - letters) > MOST_LETTERS:
            yield Alert("dead_letters", "warning", f"{new} messages could not be processed {minutes}")
        if (gone := expired - leases) > MOST_LEASES:
            text = f"workers fell silent in the middle of their work {minutes}: {gone:.0f}"
            yield Alert("leases_expire", "warning", text)
        if fenced > replaced:
            yield Alert("trainer_replaced", "warning", "two trainers were alive at once; the older one was refused")
