"""Faults of processes: killed, asked to end, stalled beyond their lease, replaced while stalled, joined and left."""

from __future__ import annotations

import random
import signal
import time
from typing import ClassVar

from tools.chaos.processes import FleetMember
from tools.chaos.service import FULL_DISK
from tools.chaos.world import Fault, Strike, World, kind

# A trainer takes seconds of CPU to import PyTorch, all others half a second: about a tenth of the faults hit it.


class _Kill(Fault):
    """kill -9."""

    role: ClassVar[str]

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        victim = _choose(world, rng, self.role)
        if victim is None or not victim.signal(signal.SIGKILL):
            return None
        victim.asked = "kill"
        return Strike(victim.name, detail={"pid": victim.pid})


class _Term(Fault):
    """SIGTERM, as every orderly shutdown sends it."""

    role: ClassVar[str]

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        victim = _choose(world, rng, self.role)
        # Before the service has installed its handler, after its imports, a SIGTERM is just a kill.
        if victim is None or not _wrote(world, victim, "ready", "answered"):
            return None
        if not victim.signal(signal.SIGTERM):
            return None
        victim.asked, victim.asked_at = "term", time.monotonic()
        return Strike(victim.name, detail={"pid": victim.pid})


class _Stop(Fault):
    """SIGSTOP until after the lease, then SIGCONT: it comes back with work that others have taken over."""

    role: ClassVar[str]

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        victim = _choose(world, rng, self.role)
        if victim is None or not victim.signal(signal.SIGSTOP):
            return None
        victim.stopped = True

        def go_on() -> None:
            victim.signal(signal.SIGCONT)
            victim.stopped = False

        return Strike(victim.name, go_on, world.lease_s + rng.uniform(0.5, 3.0), detail={"pid": victim.pid})


@kind
class KillGenerator(_Kill):
    kind, weight, role = "kill generator", 9.0, "generator"


@kind
class KillReward(_Kill):
    kind, weight, role = "kill reward", 9.0, "reward"


@kind
class KillFeeder(_Kill):
    kind, weight, role = "kill feeder", 6.0, "feeder"


@kind
class KillTrainer(_Kill):
    kind, weight, role = "kill trainer", 4.0, "trainer"


@kind
class TermGenerator(_Term):
    kind, weight, role = "term generator", 5.0, "generator"


@kind
class TermReward(_Term):
    kind, weight, role = "term reward", 5.0, "reward"


@kind
class TermFeeder(_Term):
    kind, weight, role = "term feeder", 3.0, "feeder"


@kind
class TermTrainer(_Term):
    kind, weight, role = "term trainer", 2.0, "trainer"


@kind
class StopGenerator(_Stop):
    kind, weight, role = "stop generator", 4.0, "generator"


@kind
class StopReward(_Stop):
    kind, weight, role = "stop reward", 4.0, "reward"


@kind
class StopFeeder(_Stop):
    kind, weight, role = "stop feeder", 3.0, "feeder"


@kind
class StopTrainer(_Stop):
    kind, weight, role = "stop trainer", 2.0, "trainer"


@kind
class ZombieTrainer(Fault):
    """SIGSTOP the trainer, start a second one, SIGCONT the first: it must end by itself and change nothing."""

    kind, weight = "zombie trainer", 2.5

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        # One that shares a GPU has no successor while it has its memory.
        victim = _choose(world, rng, "trainer") if world.fleet.gpu is None else None
        # One that has not taken the run over yet is no zombie when it wakes, and neither is one without a successor.
        if victim is None or not _wrote(world, victim, "begin") or not victim.signal(signal.SIGSTOP):
            return None
        victim.stopped = True
        world.fleet.replace(victim.name)

        def go_on() -> bool:
            successor = world.fleet.members.get(victim.name)
            if successor is None or not _wrote(world, successor, "begin"):
                return False
            victim.signal(signal.SIGCONT)
            victim.stopped, victim.asked_at = False, time.monotonic()
            return True

        return Strike(victim.name, go_on, rng.uniform(8.0, 20.0), detail={"pid": victim.pid})


class _Join(Fault):
    """One more replica comes, works for a while and leaves."""

    role: ClassVar[str]

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        if sum(guest.role == self.role for guest in world.fleet.guests):
            return None
        world.joined += 1
        guest = world.fleet.invite(self.role, f"{self.role}-guest{world.joined % 4}")

        def leave() -> None:
            guest.asked, guest.asked_at = "term", time.monotonic()
            guest.signal(signal.SIGTERM)

        return Strike(guest.name, leave, rng.uniform(5.0, 12.0))


@kind
class JoinGenerator(_Join):
    kind, weight, role = "join and leave generator", 4.0, "generator"


@kind
class JoinFeeder(_Join):
    kind, weight, role = "join and leave feeder", 3.0, "feeder"


@kind
class FullDisk(Fault):
    """The disk is full at what the trainer writes next: a line of its log, a checkpoint, weights. See service.py."""

    kind, weight = "full disk", 2.0

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        flag = world.folder / FULL_DISK
        if flag.exists():
            return None
        call = rng.choice((1, 1, 2, 3, 5, 8))
        flag.write_text(str(call))
        return Strike("trainer", lambda: flag.unlink(missing_ok=True), rng.uniform(2.0, 6.0), detail={"call": call})


def _wrote(world: World, member: FleetMember, *kinds: str) -> bool:
    """Whether this process has left evidence of one of these kinds, see service.py."""
    file = world.folder / "evidence" / f"{member.name}.{member.pid}.jsonl"
    text = file.read_text(errors="replace") if file.is_file() else ""
    return any(f'"k":"{kind}"' in text for kind in kinds)


def _choose(world: World, rng: random.Random, role: str) -> FleetMember | None:
    victims = world.victims(role)
    return rng.choice(victims) if victims else None
