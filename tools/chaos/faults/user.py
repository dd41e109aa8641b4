"""Faults of users and of their code: bad examples, samples and rewards, a failing tracker, wrong clicks.

What user code can do is in user_code.py. A click is one that the product takes or refuses; it may never stop the run.
"""

from __future__ import annotations

import random
from typing import ClassVar

import redis

from broker.client import Broker
from broker.connection.connection import Connection
from deploy.client import find
from deploy.control_plane.status.run_state import LIVE_S
from schemas.config import BrokerConfig
from schemas.config.run import slots_problem
from schemas.errors import RefusedError, TidemillError
from tools.chaos import settings, user_code
from tools.chaos.world import Fault, Strike, World, kind

PATIENCE_S = 0.5
RESETS = (6, 12)
"""Connections lost one after the other, more often than a task may be delivered."""


class Misbehave(Fault):
    """User code misbehaves in a part of its calls for a while."""

    what: ClassVar[str]
    varieties: ClassVar[tuple[str, ...]]
    longest_s: ClassVar[float] = 2.0

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        flag = world.folder / f"misbehave-{self.what}"
        if flag.exists():
            return None
        variety = rng.choice(self.varieties)
        flag.write_text(variety)
        undo = lambda: flag.unlink(missing_ok=True)  # noqa: E731
        return Strike(variety, undo, rng.uniform(0.3, self.longest_s), detail={"variety": variety})


@kind
class BadExamples(Misbehave):
    kind, weight, what, varieties = "bad examples", 4.0, "dataset", user_code.DATASET


@kind
class BadSamples(Misbehave):
    kind, weight, what, varieties = "bad samples", 4.0, "workflow", user_code.WORKFLOW


@kind
class BadRewards(Misbehave):
    kind, weight, what, varieties = "bad rewards", 4.0, "reward", user_code.REWARD


@kind
class TrackerOutage(Misbehave):
    kind, weight, what, varieties, longest_s = "tracker fails", 2.0, "tracker", ("raises",), 20.0


@kind
class ChangeSettings(Fault):
    """Settings at random, taken or refused, and back a little later."""

    kind, weight = "settings", 4.0

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        staleness, batch = rng.randint(0, world.staleness), rng.randint(1, settings.GROUPS)
        broker = open_broker(world)
        try:
            state = broker.ledger.read_state()
            window = broker.connection.client.hget(world.keys.ctl, "window")
            if not state.leader_term or window is None:
                return None
            problem = slots_problem(staleness, batch, int(window))
            taken = broker.ledger.change_settings({"staleness": staleness, "batch": batch})
        except RefusedError as error:
            if problem is None:
                world.problems.append(f"staleness {staleness} and batch {batch} were refused: {error}")
            return Strike("refused", detail={"staleness": staleness, "batch": batch})
        except (TidemillError, redis.RedisError):
            return None
        if problem is not None and taken:
            world.problems.append(f"staleness {staleness} and batch {batch} were taken, although {problem}")

        def back() -> bool:
            try:
                return open_broker(world).ledger.change_settings(
                    {"staleness": world.staleness, "batch": settings.GROUPS}
                )
            except (TidemillError, redis.RedisError):
                return False

        detail = {"staleness": staleness, "batch": batch}
        return Strike("taken", back, rng.uniform(0.5, 6.0), detail=detail) if taken else None


@kind
class Purge(Fault):
    """``tidemill purge`` of the run while it is alive: refused."""

    kind, weight = "purge of a live run", 2.0

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        broker = open_broker(world)
        try:
            if not world.server.up or not broker.heartbeats.list_heard(LIVE_S / 2):
                return None
            find.purge(broker, settings.RUN, yes=True)
        except RefusedError:
            return Strike("refused")
        except (TidemillError, redis.RedisError):
            return None
        world.problems.append("a purge deleted the run while its services were alive")
        return Strike("deleted", back_to=0.0)


@kind
class SecondRun(Fault):
    """The trainer of a second run of the same name in another folder: it must end, and change nothing."""

    kind, weight = "second run of the name", 1.5

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        if any(guest.asked == "intruder" for guest in world.fleet.guests):
            return None
        try:
            control = open_broker(world).run_control.read() if world.server.up else None
        except (TidemillError, redis.RedisError):
            return None
        # A server that knows of no run has nothing to refuse it by.
        if control is None or not control.run_id:
            return None
        folder = world.folder / "second-run"
        guest = world.fleet.invite("trainer", "intruder", [f"run.folder={folder}"])
        guest.asked = "intruder"
        return Strike(guest.name, detail={"pid": guest.pid})


@kind
class LostConnections(Fault):
    """A service loses its connection again and again under the same work: none of it may count as a death."""

    kind, weight = "connections lost", 3.0

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        names = [name for name in sorted(world.fleet.members) if name.startswith(("generator", "reward"))]
        if not names:
            return None
        name, left = rng.choice(names), rng.randint(*RESETS)

        def again() -> bool:
            nonlocal left
            world.proxy.reset([name])
            left -= 1
            return left <= 0

        return Strike(name, again, 0.2)


def open_broker(world: World) -> Broker:
    return Broker(Connection(world.server.url, world.keys, PATIENCE_S), BrokerConfig(deadline_s=PATIENCE_S))
