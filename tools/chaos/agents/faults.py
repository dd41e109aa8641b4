"""Faults of agents: their worker processes killed and frozen, their connections cut, their code misbehaving."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from pathlib import Path

from schemas.system import guard
from tools.chaos.agents import agent
from tools.chaos.faults.user import Misbehave
from tools.chaos.processes import endpoint
from tools.chaos.world import Fault, Strike, World, kind

GUARDIANS = 0.2
"""How often not the worker is killed but the guardian that stands before it."""


@kind
class KillWorker(Fault):
    """kill -9 of a process in which agents run."""

    kind, weight = "agent worker killed", 5.0

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        guardian = rng.random() < GUARDIANS
        found = _choose(world, rng, "guard.py" if guardian else _program(world))
        if found is None:
            return None
        name, pid = found
        _signal(pid, signal.SIGKILL)
        return Strike(name, detail={"pid": pid, "guardian": guardian})


@kind
class StopWorker(Fault):
    """SIGSTOP of a process in which agents run, now and then until after its episodes' deadline."""

    kind, weight = "agent worker stopped", 3.0

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        found = _choose(world, rng, _program(world))
        if found is None:
            return None
        name, pid = found
        _signal(pid, signal.SIGSTOP)
        seconds = rng.choice((rng.uniform(0.5, 3.0), rng.uniform(0.5, 3.0), rng.uniform(8.0, 14.0)))
        return Strike(name, lambda: _signal(pid, signal.SIGCONT), seconds, detail={"pid": pid})


@kind
class EndpointReset(Fault):
    """Connections of agents to the policy end with RST."""

    kind, weight = "endpoint reset", 4.0

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        if (name := _endpoint(world, rng)) is None:
            return None
        world.proxy.reset([name])
        return Strike(name)


@kind
class EndpointDropsReplies(Fault):
    """Agents' requests are answered, but the answers never arrive: what makes libraries ask again."""

    kind, weight = "endpoint drops replies", 4.0

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        if (name := _endpoint(world, rng)) is None:
            return None
        world.proxy.drop_replies([name], rng.uniform(0.02, 1.5))
        return Strike(name)


@kind
class EndpointHalfOpen(Fault):
    """Agents' connections look alive while nothing arrives; now and then beyond the endpoint's own patience."""

    kind, weight = "endpoint half-open", 2.0

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        if (name := _endpoint(world, rng)) is None:
            return None
        seconds = rng.choice((rng.uniform(0.2, 2.0), rng.uniform(5.0, 8.0)))
        world.proxy.half_open([name], seconds)
        return Strike(name, detail={"seconds": round(seconds, 1)})


@kind
class EndpointDelay(Fault):
    """Agents' requests and their answers take longer."""

    kind, weight = "endpoint delay", 2.0

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        if (name := _endpoint(world, rng)) is None:
            return None
        world.proxy.delay([name], rng.choice((0.05, 0.5)))
        return Strike(name, lambda: world.proxy.heal([name]), rng.uniform(1.0, 3.0))


@kind
class BadAgents(Misbehave):
    kind, weight, what, varieties = "bad agents", 6.0, "agent", agent.VARIETIES

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        return super().strike(world, rng) if world.workload != "text" else None


def _program(world: World) -> str:
    return "agent.py" if world.workload == "programs" else "runner"


def _endpoint(world: World, rng: random.Random) -> str | None:
    victims = world.victims("generator") if world.workload != "text" else []
    return endpoint(rng.choice(victims).name) if victims else None


def _choose(world: World, rng: random.Random, program: str) -> tuple[str, int] | None:
    """A generator's name, and the id of a process of its agents that runs this program."""
    parents = guard.parents()
    found = [
        (member.name, pid)
        for member in (world.victims("generator") if world.workload != "text" else [])
        for pid in sorted(guard.descendants(member.pid, parents))
        if _runs(pid, program)
    ]
    return rng.choice(found) if found else None


def _runs(pid: int, program: str) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    return any(Path(word).name == program for word in words[:6])


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
