"""What faults act on: the services, the server, the network between them, and what the run is like.

Also the contract of a fault: ``strike`` does it and tells how to undo it, or returns None when it makes no
sense right now (its victim is down already).
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from broker.connection.keys import Keys
from tools.chaos.outside.teacher import Teacher
from tools.chaos.processes import Fleet, FleetMember
from tools.chaos.proxy import Proxy
from tools.chaos.server import Server


@dataclass
class World:
    """groups, samples: B and n. staleness: the bound. slots: most groups admitted at once. cursor: next task id, as
    last seen. problems: promises that a fault itself saw break."""

    folder: Path
    fleet: Fleet
    server: Server
    proxy: Proxy
    keys: Keys
    lease_s: float
    groups: int
    samples: int
    slots: int
    staleness: int
    workload: str = "text"
    teacher: Teacher | None = None
    cursor: int = 0
    joined: int = 0
    problems: list[str] = field(default_factory=list)

    def victims(self, role: str) -> list[FleetMember]:
        """Members of a role that are there and not stopped."""
        return [
            member
            for member in self.fleet.members.values()
            if member.role == role and not member.stopped and not member.asked and member.process.poll() is None
        ]


@dataclass
class Strike:
    """One fault that happened. seconds: how long it lasts, 0 when there is nothing to undo. undo: is tried again a
    little later when it returns False.

    back_to: for a fault that makes the server forget, the moment (monotonic) whose state it went back to.
    """

    target: str
    undo: Callable[[], bool | None] | None = None
    seconds: float = 0.0
    back_to: float | None = None
    detail: dict[str, Any] = field(default_factory=dict)


class Fault(ABC):
    """A kind of fault. weight: its share among all that are possible."""

    kind: ClassVar[str]
    weight: ClassVar[float] = 1.0

    @abstractmethod
    def strike(self, world: World, rng: random.Random) -> Strike | None:
        """Inject the fault; None if it is not possible now."""


KINDS: list[Fault] = []
"""One fault of each kind."""


def kind(fault: type[Fault]) -> type[Fault]:
    """Class decorator: add a fault to KINDS."""
    KINDS.append(fault())
    return fault
