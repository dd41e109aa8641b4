"""A run's status as the control plane would make it of made-up counts."""

from __future__ import annotations

from broker.api.status.collector import Collector, PlannedRun
from broker.flow.ledger import LedgerState
from broker.telemetry.stream_lag import StreamLag
from schemas.control_api import RunStatus

LEDGER = LedgerState(
    "running",
    False,
    3,
    3,
    10,
    2,
    1,
    9,
    2,
    0,
    4,
    9,
    5,
    1,
    5,
    dropped={"stale": 1},
    failed={"no_reward": 1},
    leader_term=1,
)


def make_status() -> RunStatus:
    names = ("tasks", "eval_tasks", "trajectories", "scored")
    lags = [StreamLag(name, 3, 1, 2, 10, 95.0) for name in names]
    collector = Collector(None, PlannedRun("run"))  # type: ignore[arg-type]
    collector.history.add({"step": 3, "reward/mean": 0.5})
    collector._memory = 1000
    found = collector._status(LEDGER, lags, [], [], 100.0)
    return found.model_copy(update={"evaluation": None})
