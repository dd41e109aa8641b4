"""The number of replicas of a run: whether and on which machines an order can change it, or the command that does."""

from collections import Counter
from collections.abc import Sequence

from broker.flow.run_control import ControlState, RunControl
from schemas.control_api.orders import ROOM, on_node, scaled_role
from schemas.control_api.status import Scaling, ServiceStatus
from schemas.errors import RefusedError

SCALABLE = ("generator", "reward")
NO_SUPERVISOR = "no supervisor of this run is running (`tidemill up` did not start it), so no service takes the order; "
"""The beginning of a refusal."""


def scaling(
    orders: ControlState, services: Sequence[ServiceStatus], hint: str, pools: Sequence[str], max_devices: int | None
) -> Scaling:
    """Return whether an order can change the number of replicas, and how many there are to be."""
    live = [service for service in services if service.live]
    if not any(service.role == "supervisor" for service in live):
        refusal = NO_SUPERVISOR + scale_command(hint, "generator", "N")
        return Scaling(possible=False, by="nobody", replicas={}, refusal=refusal, max_devices=max_devices)
    alive = Counter(scaled_role(service.role, service.pool) for service in live if service.role in SCALABLE)
    replicas = {}
    for kind in [*(scaled_role("generator", pool) for pool in pools or [""]), "reward"]:
        wanted = [orders.replicas[name] for name in {kind, *machines(kind, services)} if name in orders.replicas]
        replicas[kind] = sum(wanted) if wanted else alive[kind]
    return Scaling(possible=True, by="supervisor", replicas=replicas, refusal="", max_devices=max_devices)


def machines(kind: str, services: Sequence[ServiceStatus]) -> dict[str, int]:
    """Return how many services of a kind each machine has room for, by the name of the order to it."""
    room, there = f"{ROOM}{kind}", [service for service in services if service.live]
    nodes = {service.name: service.name.removeprefix("node-") if service.role == "node" else "" for service in there}
    return {on_node(kind, nodes[one.name]): int(one.figures[room]) for one in there if room in one.figures}


def order_replicas(run_control: RunControl, services: Sequence[ServiceStatus], kind: str, total: int, by: str) -> bool:
    """Order so many services of a kind, and return whether that changes anything; RefusedError without room for them.

    The machine of `tidemill up` has as many as it was configured to have, the others share the rest evenly as far as
    they have room, and what is left goes to the first again.
    """
    rooms = machines(kind, services)
    counts = {kind: min(total, rooms.pop(kind))} if kind in rooms else {}
    left = total - sum(counts.values())
    for at, name in enumerate(sorted(rooms, key=rooms.__getitem__)):
        counts[name] = min(rooms[name], left // (len(rooms) - at))
        left -= counts[name]
    if kind in counts:
        counts[kind] += left
    elif left:
        raise RefusedError(f"the machines of `tidemill node` that are here have room for {total - left} {kind}")
    return any([run_control.scale(name, count, by) for name, count in counts.items()])


def scale_command(hint: str, role: str, replicas: str) -> str:
    """Return the command that changes replicas without a supervisor: the configured one, if there is one."""
    if hint:
        return f"run: {hint.replace('{role}', role).replace('{replicas}', replicas)}"
    return (
        f"change the number of replicas where its services were started: docker compose up -d --no-recreate --scale"
        f" {role}={replicas} {role}, kubectl scale deployment {role} --replicas={replicas}, or start and stop"
        f" `tidemill {role} CONFIG` by hand"
    )
