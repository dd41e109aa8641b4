"""Entries that no service of the run wrote, in each of the three streams, as a bug or a stray client would leave them.

An entry that pretends to be the outcome of a sample in progress is not among the scored ones: who may write
there can say about a sample whatever he likes.
"""

from __future__ import annotations

import random
from typing import ClassVar

from schemas.codec import Array, encode
from schemas.messages import Sampling, Score, Span, Task, Trajectory
from tools.chaos.faults.broker import _command
from tools.chaos.world import Fault, Strike, World, kind

UNKNOWN = 10**12
"""Task ids from here on were never admitted."""
Fields = dict[str, bytes]
BODY = "body"
"""Of an entry in whose place its body's name travels, the body."""


class _Poison(Fault):
    """One entry of a random variety."""

    stream: ClassVar[str]

    def varieties(self, world: World, rng: random.Random) -> dict[str, Fields]:
        raise NotImplementedError

    def strike(self, world: World, rng: random.Random) -> Strike | None:
        varieties = self.varieties(world, rng)
        chosen = rng.sample(sorted(varieties), k=min(3, len(varieties)))
        key = getattr(world.keys, self.stream)

        def add(client: object) -> bool:
            # NOMKSTREAM: a stream that is not there stays so.
            for name in chosen:
                fields = dict(varieties[name])
                if (content := fields.pop(BODY, None)) is not None:
                    fields["b"] = b"poison.%d" % rng.getrandbits(64)
                    world.server.client.hset(world.keys.bodies, fields["b"], content)
                world.server.client.xadd(key, fields, nomkstream=True)  # type: ignore[arg-type]
            return True

        strike = _command(world, self.stream, add)
        if strike is not None:
            strike.detail["varieties"] = chosen
        return strike


@kind
class PoisonTasks(_Poison):
    kind, weight, stream = "poison tasks", 3.0, "tasks"

    def varieties(self, world: World, rng: random.Random) -> dict[str, Fields]:
        unknown, old, active = _ids(world, rng)
        return {
            "no fields": {"x": b"1"},
            "garbage": {"t": b"%d" % unknown, "v": b"0", "b": rng.randbytes(40)},
            "garbage for an active group": {"t": b"%d" % active, "v": b"0", "b": rng.randbytes(40)},
            "another message": {"t": b"%d" % unknown, "v": b"0", "b": encode(Score())},
            "bad version": {"t": b"%d" % unknown, "v": b"soon", "b": _task(unknown, world)},
            "unknown group": {"t": b"%d" % unknown, "v": b"0", "b": _task(unknown, world)},
            "trained group": {"t": b"%d" % old, "v": b"0", "b": _task(old, world)},
            "active group again": {"t": b"%d" % active, "v": b"0", "b": _task(active, world)},
        }


@kind
class PoisonTrajectories(_Poison):
    kind, weight, stream = "poison trajectories", 3.0, "trajectories"

    def varieties(self, world: World, rng: random.Random) -> dict[str, Fields]:
        unknown, old, active = _ids(world, rng)
        return {
            "no fields": {"x": b"1"},
            "no body": {"t": b"%d" % active, "s": b"0", "b": b"nothing.0"},
            "garbage": {"t": b"%d" % unknown, "s": b"0", BODY: rng.randbytes(40)},
            "garbage for an active group": {"t": b"%d" % active, "s": b"0", BODY: rng.randbytes(40)},
            "another message": {"t": b"%d" % unknown, "s": b"0", BODY: encode(Score())},
            "another sample": {"t": b"%d" % unknown, "s": b"0", BODY: _trajectory(unknown, 1)},
            "unknown group": {"t": b"%d" % unknown, "s": b"0", BODY: _trajectory(unknown, 0)},
            "trained group": {"t": b"%d" % old, "s": b"0", BODY: _trajectory(old, 0)},
            "active group again": {"t": b"%d" % active, "s": b"0", BODY: _trajectory(active, 0)},
        }


@kind
class PoisonScored(_Poison):
    kind, weight, stream = "poison scored", 3.0, "scored"

    def varieties(self, world: World, rng: random.Random) -> dict[str, Fields]:
        unknown, old, _ = _ids(world, rng)
        size = b"%d" % world.samples
        return {
            "no fields": {"x": b"1"},
            "garbage": {"t": b"%d" % unknown, "n": size, "0:1-1": rng.randbytes(40)},
            "another message": {"t": b"%d" % unknown, "n": size, "0:-": _task(unknown, world)},
            "unknown group": {"t": b"%d" % unknown, "n": b"1", "0:1-1": encode(Score(reward=1.0))},
            "trained group": {"t": b"%d" % old, "n": b"1", "0:1-1": encode(Score(reward=1.0))},
            "no size": {"t": b"%d" % unknown, "0:1-1": encode(Score(reward=1.0))},
        }


def _ids(world: World, rng: random.Random) -> tuple[int, int, int]:
    """Task ids: never admitted, ended long ago, in the pipeline now (as far as the last look can tell)."""
    unknown = UNKNOWN + rng.randrange(10**6)
    old = rng.randrange(max(1, world.cursor - 4 * world.slots))
    active = max(0, world.cursor - 1 - rng.randrange(world.groups))
    return unknown, old, active


def _task(task_id: int, world: World) -> bytes:
    return encode(Task(task_id=task_id, kind="train", n=world.samples, sampling=Sampling(max_tokens=8), text="1+1="))


def _trajectory(task_id: int, sample: int) -> bytes:
    return encode(
        Trajectory(
            run="poison",
            task_id=task_id,
            sample=sample,
            kind="train",
            tokens=Array.of([5, 6, 7, 8], "i4"),
            loss_mask=Array.of([0, 0, 1, 1], "u1"),
            logprobs=Array.of([0.0, 0.0, -1.0, -1.0], "f4"),
            spans=[Span(0, 2, 4)],
            turns=[],
            finish="stop",
            prompt="1+",
            completion="1=",
            generator="poison",
        )
    )
