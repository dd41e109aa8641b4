"""The state of a run and of its pause: pure functions of what the broker and the services report."""

from collections.abc import Iterable, Sequence

from broker.flow.ledger import LedgerState
from broker.flow.run_control import ControlState
from broker.telemetry.stream_lag import StreamLag
from schemas.control_api.base import OVER, PauseMode, RunState
from schemas.control_api.status import PauseStatus
from schemas.messages import Heartbeat

LIVE_S = 15.0
"""A service that was silent for longer is not waited for: generators stop by themselves before (see FENCE_S there)."""
SAMPLERS = ("generator", "trainer")
"""Roles that a freeze stops."""
LOADING = ("loading", "starting", "replaying")
"""States of a service that does not work yet."""
UNDER_WAY = ("tasks", "eval_tasks", "trajectories")
"""Streams that a drain empties; what is scored waits for a full batch."""


PIPELINE = ("trainer", "generator", "reward", "feeder")


def is_live(beat: Heartbeat, now: float) -> bool:
    """Return whether a service has a recent heartbeat; ``now`` is the broker's clock, Unix seconds."""
    return now - beat.time < LIVE_S


def missing_roles(live: Iterable[Heartbeat]) -> list[str]:
    """Return the roles of the pipeline that no live service has."""
    roles = {beat.role for beat in live}
    return [role for role in PIPELINE if role not in roles]


def pause_status(
    orders: ControlState, beats: Sequence[Heartbeat], lags: Sequence[StreamLag], now: float
) -> PauseStatus:
    """Return the present pause, and the services or streams that it waits for."""
    asked: dict[PauseMode, Sequence[str]] = {"freeze": SAMPLERS, "drain": ("trainer",)}
    live = [beat for beat in beats if beat.role in asked.get(orders.pause, ()) and is_live(beat, now)]
    missing = [beat.service for beat in live if beat.acknowledged.get("pause") != orders.pause_id]
    if orders.pause == "drain":
        missing += [lag.name for lag in lags if lag.name in UNDER_WAY and lag.waiting + lag.pending]
    done, since = orders.pause != "none" and not missing, orders.since or None
    return PauseStatus.of(orders, mode=orders.pause, id=orders.pause_id, since=since, done=done, waiting_for=missing)


def run_state(ledger: LedgerState, pause: PauseStatus, beats: Sequence[Heartbeat], now: float) -> tuple[RunState, str]:
    """Return the state of the run, and what it waits for or why it failed."""
    live = {beat.role: beat for beat in beats if is_live(beat, now)}
    if ledger.state in OVER:
        return ledger.state, ledger.cause  # type: ignore[return-value]
    if "supervisor" in live and live["supervisor"].state == "stopping":
        return "stopping", "services are being stopped in order"
    if pause.done:
        return "paused", ""
    if pause.mode != "none":
        return ("draining" if pause.mode == "drain" else "pausing"), f"waiting for {', '.join(pause.waiting_for)}"
    missing = missing_roles(live.values())
    cause = f"no heartbeat of any {' or '.join(missing)}" if missing else ""
    if not ledger.leader_term:
        return "starting", cause or "the trainer has not begun"
    if "trainer" in live and live["trainer"].state == "finishing":
        return "finishing", "the last evaluation is under way"
    if "trainer" not in live:
        return "starting", cause
    if missing:
        return "running", cause
    loading = [beat.service for beat in beats if beat.state in LOADING and is_live(beat, now)]
    return "running", f"{', '.join(loading)} still loading" if loading else ""
