"""Faults of what a run learns from outside: the control plane, which takes rewards, a teacher, a generator at fault."""

from __future__ import annotations

import random
import signal
import time

import redis

from schemas.errors import TidemillError
from tools.chaos.faults.processes import _Kill, _Stop, _wrote
from tools.chaos.faults.user import open_broker
from tools.chaos.outside.witness import WRONG
from tools.chaos.processes import FleetMember
from tools.chaos.world import Fault, Strike, World, kind

LONGEST_S = 60.0
"""For so long a generator at fault waits to be quarantined."""


@kind
class KillControl(_Kill):
    kind, weight, role = "kill control plane", 6.0, "control"


@kind
class StopControl(_Stop):
    kind, weight, role = "stop control plane", 3.0, "control"


@kind
class KillTeacher(Fault):
    """kill -9 of a teacher's server; it comes back a little later."""

    kind, weight = "kill teacher", 6.0

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        teacher = world.teacher
        if teacher is None or not teacher.up:
            return None
        teacher.kill()
        return Strike("teacher", teacher.start, rng.choice((0.0, rng.uniform(0.5, 4.0))))


@kind
class StopTeacher(Fault):
    """SIGSTOP of a teacher's server, now and then beyond the deadline of a sample's rewards."""

    kind, weight = "stop teacher", 4.0

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        teacher = world.teacher
        if teacher is None or not teacher.up:
            return None
        teacher.signal(signal.SIGSTOP)
        return Strike("teacher", lambda: teacher.signal(signal.SIGCONT), rng.uniform(0.3, 5.0))


@kind
class WrongGenerator(Fault):
    """A generator's log-probabilities are not those of the policy any more, until it is quarantined and killed."""

    kind, weight = "wrong generator", 2.0

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        flag = world.folder / WRONG
        generators = [one for one in world.victims("generator") if _wrote(world, one, "answered")]
        # The last generator is never quarantined.
        if flag.exists() or len(generators) < 2:
            return None
        victim = rng.choice(generators)
        flag.write_text(str(victim.pid))

        end = time.monotonic() + LONGEST_S

        def restart() -> bool:
            if victim.process.poll() is None:
                if time.monotonic() < end and not _is_quarantined(world, victim):
                    return False
                victim.asked = "kill"
                victim.process.kill()
            flag.unlink(missing_ok=True)
            return True

        return Strike(victim.name, restart, rng.uniform(8.0, 20.0), detail={"pid": victim.pid})


def _is_quarantined(world: World, victim: FleetMember) -> bool:
    try:
        control = open_broker(world).run_control.read() if world.server.up else None
    except (TidemillError, redis.RedisError):
        return False
    return control is not None and control.mismatch.get(victim.name, "").endswith(f"/{victim.pid}")
