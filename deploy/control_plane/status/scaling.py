"""The number of replicas of a run: whether an order can change it, or else the command that does."""

from collections import Counter
from collections.abc import Collection, Sequence

from broker.flow.run_control import ControlState
from deploy.control_plane.status.run_state import is_live
from schemas.control_api import Scaling
from schemas.control_api.orders import scaled_role
from schemas.messages import Heartbeat

SCALABLE = ("generator", "reward")
NO_SUPERVISOR = "no supervisor of this run is running (`tidemill up` did not start it), so no service takes the order; "
"""The beginning of a refusal."""


def scaling(
    orders: ControlState,
    beats: Sequence[Heartbeat],
    now: float,
    hint: str = "",
    pools: Sequence[str] = (),
    on_nodes: Collection[str] = (),
) -> Scaling:
    """Return whether an order can change the number of replicas, and how many there are to be.

    on_nodes: pools that other machines start, as many as these have room for.
    """
    possible = any(beat.role == "supervisor" and is_live(beat, now) for beat in beats)
    refusal = NO_SUPERVISOR + scale_command(hint, "generator", "N")
    alive = Counter(scaled_role(beat.role, beat.pool) for beat in beats if beat.role in SCALABLE and is_live(beat, now))
    kinds = [*(scaled_role("generator", pool) for pool in pools or [""] if pool not in on_nodes), "reward"]
    replicas = {kind: orders.replicas.get(kind, alive[kind]) for kind in kinds}
    return Scaling(
        possible=possible,
        by="supervisor" if possible else "nobody",
        replicas=replicas if possible else {},
        refusal="" if possible else refusal,
    )


def scale_command(hint: str, role: str, replicas: str) -> str:
    """Return the command that changes replicas without a supervisor: the configured one, if there is one."""
    if hint:
        return f"run: {hint.replace('{role}', role).replace('{replicas}', replicas)}"
    return (
        f"change the number of replicas where its services were started: docker compose up -d --no-recreate --scale"
        f" {role}={replicas} {role}, kubectl scale deployment {role} --replicas={replicas}, or start and stop"
        f" `tidemill {role} CONFIG` by hand"
    )
