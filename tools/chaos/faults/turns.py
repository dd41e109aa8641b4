"""Faults of a shared GPU, with ``--turns``: its holder is killed or stopped, a generator dies while it wakes."""

from __future__ import annotations

import random
import signal
import time

from tools.chaos.processes import FleetMember
from tools.chaos.turns import DIE_WAKING, SHARER, SILENT_S
from tools.chaos.world import Fault, Strike, World, kind


@kind
class KillHolder(Fault):
    """kill -9 of the process that has the GPU."""

    kind, weight = "kill holder of the GPU", 6.0

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        victim = _holder(world)
        if victim is None or not victim.signal(signal.SIGKILL):
            return None
        victim.asked = "kill"
        return Strike(victim.name, detail={"pid": victim.pid})


@kind
class StopHolder(Fault):
    """SIGSTOP of the process that has the GPU: it is killed after a while, since others wait for its memory."""

    kind, weight = "stop holder of the GPU", 4.0

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        victim = _holder(world)
        if victim is None or not victim.signal(signal.SIGSTOP):
            return None
        victim.stopped = True

        def go_on() -> None:
            victim.signal(signal.SIGCONT)
            victim.stopped = False

        return Strike(victim.name, go_on, rng.uniform(0.2, 3 * SILENT_S), detail={"pid": victim.pid})


@kind
class KillWaking(Fault):
    """The generator that shares dies while it wakes, before its weights are probed."""

    kind, weight = "kill while waking", 4.0

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        victim = world.fleet.members.get(SHARER)
        flag = world.folder / DIE_WAKING
        if world.fleet.gpu is None or victim is None or victim.asked or flag.exists():
            return None
        victim.asked, victim.asked_at = "kill", time.monotonic()
        flag.touch()

        def spare() -> None:
            flag.unlink(missing_ok=True)
            if world.fleet.members.get(SHARER) is victim and victim.process.poll() is None:
                victim.asked = ""

        return Strike(victim.name, spare, 5.0, detail={"pid": victim.pid})


def _holder(world: World) -> FleetMember | None:
    if world.fleet.gpu is None:
        return None
    pid = world.fleet.gpu.holder()
    found = [*world.victims("generator"), *world.victims("trainer")]
    return next((member for member in found if member.pid == pid), None)
