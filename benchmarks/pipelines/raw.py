"""The limit of any pipeline: the same bytes over the same hops with bare Redis commands, pipelined with redis-py.

The same three processes and entries as ours, made beforehand: a task to the producer, a trajectory from it to the
reward, the trajectory and a score to the assembler. XADD and XREADGROUP for each hop, XACK and XDEL for all of an
answer in one command; each process makes one round trip for a whole batch. A body is sent once and read twice, as
in ours. There is no ledger, journal, ownership check, validation, decoding or fencing, and a crash anywhere loses
or repeats entries. A credit stream, one entry a step, keeps as many entries in flight as our slots do.
"""

from __future__ import annotations

from typing import Any

import redis

from benchmarks.harness.workload import PipelineShape, TrajectoryPool
from benchmarks.pipelines.tidemill import GROUPS_AT_ONCE, REWARDS_AT_ONCE
from broker.connection.connection import BLOCK_MS, open_client
from broker.connection.keys import Keys
from broker.queues.consumer_group import number
from schemas.codec import encode

REWARD, TRAINER, PRODUCER = "reward", "trainer", "generators"


class _RedisPipeline:
    """Streams and consumer groups of the pipeline of bare Redis commands."""

    def __init__(self, url: str, run: str, pool: TrajectoryPool, flow: PipelineShape) -> None:
        base = Keys("tidemill", run).base
        self._tasks, self._bodies = f"{base}:raw_tasks", f"{base}:raw_bodies"
        self._scores, self._credits = f"{base}:raw_scores", f"{base}:raw_credits"
        self._client = open_client(url)
        self._flow = flow
        task = pool.task(0, flow.samples)
        trajectories = [pool.trajectory(task, sample, 0) for sample in range(flow.samples)]
        self._task = encode(task)
        self._samples = [encode(trajectory) for trajectory in trajectories]
        self._score = encode(pool.score(trajectories[0]))
        for stream, group in (
            (self._tasks, PRODUCER),
            (self._bodies, REWARD),
            (self._bodies, TRAINER),
            (self._scores, TRAINER),
            (self._credits, PRODUCER),
        ):
            try:
                self._client.xgroup_create(stream, group, id="0", mkstream=True)
            except redis.ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise


def entries(reply: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Return the entries of an XREAD or XREADGROUP on one stream, in either protocol version."""
    found: list[tuple[bytes, dict[bytes, bytes]]] = []
    for _, batch in reply.items() if isinstance(reply, dict) else reply or []:
        found += batch[0] if batch and isinstance(batch[0], list) else batch
    return found


class Producer(_RedisPipeline):
    """The producer adds tasks, reads them, and adds a body for each sample."""

    def run(self, steps: int) -> dict[str, Any]:
        flow, client = self._flow, self._client
        # Delete credits of an earlier run's last steps.
        self._spend(entries(client.xreadgroup(PRODUCER, "p", {self._credits: ">"})))
        groups = steps * flow.batch
        allowed = min(groups, flow.slots)
        added = done = 0
        tasks: list[tuple[bytes, dict[bytes, bytes]]] = []
        while done < groups:
            pipe = client.pipeline(transaction=False)
            for _, fields in tasks:
                for sample, body in enumerate(self._samples):
                    pipe.xadd(self._bodies, {b"t": fields[b"t"], b"s": sample, b"b": body})
                done += 1
            if tasks:
                ids = [task_id for task_id, _ in tasks]
                pipe.xack(self._tasks, PRODUCER, *ids)
                pipe.xdel(self._tasks, *ids)
            fresh = min(allowed - added, GROUPS_AT_ONCE)
            for task in range(added, added + fresh):
                pipe.xadd(self._tasks, {b"t": task, b"v": 0, b"b": self._task})
            added += fresh
            pipe.xreadgroup(PRODUCER, "p", {self._tasks: ">"}, count=GROUPS_AT_ONCE)
            tasks = entries(pipe.execute()[-1])
            if not tasks and done < groups:
                credits = entries(client.xreadgroup(PRODUCER, "p", {self._credits: ">"}, block=BLOCK_MS))
                allowed = min(groups, allowed + len(credits) * flow.batch)
                self._spend(credits)
        return {}

    def _spend(self, credits: list[tuple[bytes, dict[bytes, bytes]]]) -> None:
        if credits:
            ids = [credit for credit, _ in credits]
            pipe = self._client.pipeline(transaction=False)
            pipe.xack(self._credits, PRODUCER, *ids)
            pipe.xdel(self._credits, *ids)
            pipe.execute()


class Rewarder(_RedisPipeline):
    """The reward service reads bodies and adds a score for each."""

    def run(self, steps: int) -> dict[str, Any]:
        missing = steps * self._flow.per_step
        size = self._flow.samples
        while missing:
            reply = self._client.xreadgroup(REWARD, "r", {self._bodies: ">"}, count=REWARDS_AT_ONCE, block=BLOCK_MS)
            bodies = entries(reply)
            if not bodies:
                continue
            pipe = self._client.pipeline(transaction=False)
            for entry_id, fields in bodies:
                pipe.xadd(
                    self._scores,
                    {b"t": fields[b"t"], b"s": fields[b"s"], b"n": size, b"e": entry_id, b"b": self._score},
                )
            pipe.xack(self._bodies, REWARD, *[entry_id for entry_id, _ in bodies])
            pipe.execute()
            missing -= len(bodies)
        return {}


class Assembler(_RedisPipeline):
    """The trainer reads a step's scores and bodies, acknowledges and deletes both, and gives a credit."""

    def run(self, steps: int) -> dict[str, Any]:
        trained = 0
        for _ in range(steps):
            scores = self._read(self._scores, self._flow.per_step)
            bodies = self._read(self._bodies, self._flow.per_step)
            pipe = self._client.pipeline(transaction=False)
            for stream, found in ((self._scores, scores), (self._bodies, bodies)):
                ids = [entry_id for entry_id, _ in found]
                pipe.xack(stream, TRAINER, *ids)
                pipe.xdel(stream, *ids)
            pipe.xadd(self._credits, {b"c": 1})
            pipe.execute()
            trained += len({(number(f[b"t"]), number(f[b"s"])) for _, f in bodies})
        return {"trained": trained}

    def _read(self, stream: str, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        found: list[tuple[bytes, dict[bytes, bytes]]] = []
        while len(found) < count:
            reply = self._client.xreadgroup(TRAINER, "t", {stream: ">"}, count=count - len(found), block=BLOCK_MS)
            found += entries(reply)
        return found
