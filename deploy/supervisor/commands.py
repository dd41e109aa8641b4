"""Follows the users' orders to a supervisor in the broker: numbers of replicas, and the end of the run.

At the start the numbers of the configuration are written into the broker, and earlier orders are ignored. Each machine
of `tidemill node` has numbers of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import redis
import structlog

from broker.client import Broker
from broker.flow.run_control import ControlState
from deploy.supervisor.supervisor import RunOutcome, Supervisor
from schemas.control_api.orders import ROOM, on_node
from schemas.errors import ConfigError, InfraError, TidemillError

BY = "tidemill up"

log = structlog.get_logger()


@dataclass(eq=False)
class CommandFollower:
    """Carries out orders: ``follow`` is called at every tick, ``describe`` for the heartbeat.

    refuse: why a run may not have so many replicas by role, or nothing. node: the machine, "" for `tidemill up`, which
    alone ends the run. ``ordered``: whether an order has ended the run. Set ``stopping`` when services are being
    stopped. ``orders``: those that ``look`` has read.
    """

    supervisor: Supervisor
    broker: Broker
    refuse: Callable[[Mapping[str, int]], str] = lambda _: ""
    node: str = ""
    orders: ControlState | None = field(default=None, init=False)
    stopping: bool = field(default=False, init=False)
    ordered: bool = field(default=False, init=False)
    _stop_seen: int = field(default=0, init=False)
    _rooms: dict[str, float] = field(default_factory=dict, init=False)
    _done: dict[str, int] = field(default_factory=dict, init=False)

    def begin(self, replicas: Mapping[str, int]) -> None:
        """Write the initial numbers of replicas, and remember which orders are old."""
        for role, count in replicas.items():
            self.broker.run_control.scale(on_node(role, self.node), count, BY)
        orders = self.broker.run_control.read() or ControlState()
        self._stop_seen = orders.stop
        self._done = dict(orders.scaled)
        self._rooms = {f"{ROOM}{role}": float(count) for role, count in replicas.items()}

    def describe(self) -> tuple[str, int, dict[str, float]]:
        """Return state, weight version (none) and the room by role for the supervisor's heartbeat."""
        return "stopping" if self.stopping else "running", -1, self._rooms

    def look(self) -> None:
        """Read the orders, once begun; any thread may wait for the broker here."""
        if self._rooms:
            self.orders = self.broker.run_control.read()

    def follow(self, orders: ControlState | None) -> None:
        """Carry out new orders, each once."""
        if orders is None or self.stopping:
            return
        if orders.stop > self._stop_seen and not self.node:
            self.ordered = True
            self.supervisor.end()
            return
        for name, replicas in orders.replicas.items():
            role, _, node = name.partition("@")
            number = orders.scaled.get(name, 0)
            if node != self.node or self._done.get(name) == number:
                continue
            try:
                if replicas > self.supervisor.replicas(role) and (problem := self.refuse(orders.replicas)):
                    raise ConfigError(problem)
                self.supervisor.scale(role, replicas)
            except (ConfigError, InfraError) as error:
                log.warning("cannot scale", role=role, replicas=replicas, error=str(error))
            self._done[name] = number
        # A broker that lost its data counts from 0 again.
        self._done = {name: number for name, number in self._done.items() if name in orders.replicas}

    def record(self, outcome: RunOutcome) -> None:
        """Write into the broker how the run ended, unless the trainer has reported that it is finished."""
        if outcome.reason == "finished":
            return
        try:
            self.broker.connection.deadline_s = 2.0
            self.broker.ledger.set_run_state("state", outcome.reason)
            self.broker.ledger.set_run_state("cause", str(outcome.cause) if outcome.cause else "")
        except (TidemillError, redis.RedisError) as error:
            # The run may have ended because of the broker.
            log.warning("cannot record how the run ended", error=str(error))
