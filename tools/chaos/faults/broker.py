"""Faults of the server itself: death, stalls, lost data, vanished groups and keys, full memory, a stepping clock."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, ClassVar

import redis

from tools.chaos.world import Fault, Strike, World, kind

HOUR_MS = 3_600_000
CLOSED = 1
"""A port that no process serves."""


@kind
class KillServer(Fault):
    """kill -9 of the server; it comes back on the same append-only file."""

    kind, weight = "kill redis", 5.0

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        if not world.server.answers():
            return None
        world.server.kill()
        return Strike("redis", world.server.start, rng.choice((0.0, 0.0, rng.uniform(0.2, 3.0))))


@kind
class StopServer(Fault):
    """SIGSTOP of the server for a few seconds."""

    kind, weight = "stop redis", 3.0

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        if not world.server.answers():
            return None
        world.server.freeze()
        return Strike("redis", world.server.thaw, rng.uniform(1.0, 5.0))


@kind
class Demote(Fault):
    """A failover: the server becomes a replica (of a closed port, so it loses nothing), refuses writes, and is the
    primary again a little later."""

    kind, weight = "primary becomes replica", 3.0

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        def promote() -> bool:
            return _command(world, "redis", lambda client: client.replicaof("NO", "ONE")) is not None

        def demote(client: redis.Redis) -> bool:
            return bool(client.replicaof("127.0.0.1", CLOSED))

        return _command(world, "redis", demote, promote, rng.uniform(0.5, 5.0))


@kind
class CutAof(Fault):
    """Power loss: kill -9, and the append-only file ends where it ended about a second ago."""

    kind, weight = "cut aof", 3.0

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        age_s = rng.uniform(0.3, 1.2)
        if not world.server.answers() or not world.server.can_cut(age_s):
            return None
        world.server.kill()
        cut = world.server.cut(age_s)
        back_to, lost = cut if cut else (time.monotonic(), 0)
        return Strike(
            "redis", world.server.start, rng.choice((0.0, rng.uniform(0.2, 2.0))), back_to, {"bytes_lost": lost}
        )


@kind
class FlushAll(Fault):
    """FLUSHALL: the server forgets everything."""

    kind, weight = "flushall", 1.5

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        return _command(world, "redis", lambda client: client.flushall(), back_to=0.0)


class _DeleteGroup(Fault):
    """XGROUP DESTROY: everything pending in the group is forgotten, the stream's entries stay."""

    stream: ClassVar[str]
    group: ClassVar[str]

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        key = getattr(world.keys, self.stream)
        return _command(world, self.stream, lambda client: client.xgroup_destroy(key, self.group))


@kind
class DeleteGenerators(_DeleteGroup):
    kind, weight, stream, group = "delete group of tasks", 1.5, "tasks", "generators"


@kind
class DeleteReward(_DeleteGroup):
    kind, weight, stream, group = "delete group of trajectories", 1.5, "trajectories", "reward"


@kind
class DeleteTrainer(_DeleteGroup):
    kind, weight, stream, group = "delete group of scored", 1.5, "scored", "trainer"


@kind
class MaxMemory(Fault):
    """maxmemory just below what is used: every write that needs memory is refused."""

    kind, weight = "maxmemory", 3.0

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        def limit(client: redis.Redis) -> bool:
            used: dict[str, Any] = client.info("memory")
            if int(client.config_get("maxmemory")["maxmemory"] or 0):
                return False
            client.config_set("maxmemory", int(used["used_memory"]) - 64 * 1024)
            return True

        def lift() -> bool:
            return _command(world, "redis", lambda client: client.config_set("maxmemory", 0)) is not None

        return _command(world, "redis", limit, lift, rng.uniform(1.0, 4.0))


PARTS = (
    "tasks",
    "trajectories",
    "bodies",
    "scored",
    "ctl",
    "leader_term",
    "slots",
    "counts",
    "groups",
    "samples",
    "journal",
    "readmit",
    "images",
)
"""Keys without which a run can't continue as it was."""
BESIDE = (
    *("weights", "chunks", "dead", "services", "refusals", "peers", "roll", "roll_answers", "roll_changes"),
    *("evals", "eval_tasks", "eval_samples", "partials"),
)
"""Keys whose loss may cost no sample."""


@kind
class DeleteKey(Fault):
    """One key of the run vanishes, while the others still speak of what was in it."""

    kind, weight = "delete key", 1.5

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        name = rng.choice(PARTS + BESIDE)
        key = getattr(world.keys, name)
        return _command(world, name, lambda client: client.delete(key), back_to=_back_to(name))


@kind
class WrongType(Fault):
    """A key of the run is overwritten by a string, which is deleted a few seconds later if it is still there."""

    kind, weight = "wrong type", 1.5

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        name = rng.choice(PARTS + BESIDE)
        key = getattr(world.keys, name)

        def delete() -> bool:
            def act(client: redis.Redis) -> bool:
                if client.type(key) == b"string":
                    client.delete(key)
                return True

            return _command(world, name, act) is not None

        return _command(
            world, name, lambda client: client.set(key, "x"), delete, rng.uniform(0.5, 4.0), back_to=_back_to(name)
        )


def _back_to(name: str) -> float | None:
    return 0.0 if name in PARTS else None


@kind
class ClockStep(Fault):
    """The server's clock stepped by an hour, as far as leases can tell: the pending entries of one stream get
    delivery times an hour ago or an hour ahead by XCLAIM TIME. The clock itself is not moved."""

    kind, weight = "clock step", 4.0

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        stream, group = rng.choice((("tasks", "generators"), ("trajectories", "reward"), ("scored", "trainer")))
        key = getattr(world.keys, stream)
        sign = rng.choice((-1, 1))

        def step(client: redis.Redis) -> bool:
            now = int(client.time()[0]) * 1000
            pending: Any = client.xpending_range(key, group, "-", "+", 1000)
            for entry in pending:
                owner, entry_id = entry["consumer"], entry["message_id"]
                client.xclaim(key, group, owner, 0, [entry_id], time=now + sign * HOUR_MS, justid=True)
            return bool(pending)

        return _command(world, f"{stream} {sign:+d} h", step)


def _command(
    world: World,
    target: str,
    act: Callable[[redis.Redis], Any],
    undo: Callable[[], bool | None] | None = None,
    seconds: float = 0.0,
    back_to: float | None = None,
) -> Strike | None:
    """A fault made of commands; None when the server does not take them or there was nothing to do."""
    if not world.server.up:
        return None
    try:
        done = act(world.server.client)
    except redis.RedisError:
        return None
    return Strike(target, undo, seconds, back_to) if done else None


FORGETFUL = (KillServer, CutAof, FlushAll, DeleteKey, WrongType)
"""Faults after which the server may not know any more which run it served."""
