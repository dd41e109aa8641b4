"""A run's status as the control plane would make it of made-up counts."""

from broker.flow.ledger import LedgerState
from broker.telemetry.stream_lag import StreamLag
from deploy.control_plane.status.collector import Collector, PlannedRun
from schemas.control_api.status import RunStatus

LEDGER = LedgerState(
    state="running",
    paused=False,
    step=3,
    version=3,
    steps=10,
    batch=2,
    staleness=1,
    cursor=9,
    active=2,
    readmit=0,
    capacity=4,
    admitted=9,
    skipped=0,
    trained=5,
    uncommitted_steps=1,
    max_uncommitted=5,
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
    found = collector._status(LEDGER, lags, [], 100.0)
    return found.model_copy(update={"evaluation": None})
