"""Faults of the network between one service, or all of them, and the server."""

from __future__ import annotations

import random

from tools.chaos.world import Fault, Strike, World, kind

ALL_SHARE = 0.25
"""How often a fault hits every service at once."""
SOCKET_TIMEOUT_S = 10.0
"""After so long the product's client gives a silent connection up."""


@kind
class Delay(Fault):
    """Both directions take up to half a second longer."""

    kind, weight = "network delay", 5.0

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        names, target = _choose(world, rng)
        delay_s = rng.choice((0.02, 0.1, 0.5))
        world.proxy.delay(names, delay_s)
        return Strike(target, lambda: world.proxy.heal(names), rng.uniform(1.0, 5.0), detail={"delay_s": delay_s})


@kind
class DropReplies(Fault):
    """Requests are executed, their answers never arrive, then the connection is cut: what makes duplicates."""

    kind, weight = "network drops replies", 8.0

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        names, target = _choose(world, rng)
        world.proxy.drop_replies(names, rng.uniform(0.02, 1.5))
        return Strike(target)


@kind
class HalfOpen(Fault):
    """Bytes vanish both ways while the connection looks alive; now and then until the client's own timeout."""

    kind, weight = "network half-open", 3.0

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        names, target = _choose(world, rng)
        seconds = SOCKET_TIMEOUT_S + 2.0 if rng.random() < 0.2 else rng.uniform(0.5, 4.0)
        world.proxy.half_open(names, seconds)
        return Strike(target, detail={"seconds": round(seconds, 1)})


@kind
class Reset(Fault):
    """Connections end with RST."""

    kind, weight = "network reset", 8.0

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        names, target = _choose(world, rng)
        world.proxy.reset(names)
        return Strike(target)


def _choose(world: World, rng: random.Random) -> tuple[list[str], str]:
    names = sorted(world.fleet.members)
    if rng.random() < ALL_SHARE or not names:
        return names, "all"
    name = rng.choice(names)
    return [name], name
