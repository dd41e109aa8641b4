"""How many groups a generator takes: up to its limit, and only as many as have room for their keys and values.

What is taken beyond that would wait in this generator while another has room. Pure functions.

Tasks of one generator: pull them when there is room, run each as a job, end all of them when asked to.
"""

from __future__ import annotations

import asyncio
import math
import time

from broker.client import Broker
from broker.queues.consumer_group import Delivery
from producers.engines.base import Engine, KvCacheUsage
from producers.generator.eval_versions import still_at
from producers.generator.outbox import Outbox, PartialSaver
from producers.generator.pause import PauseFollower
from producers.generator.rollout import GeneratorContext, Rollout
from producers.generator.weight_updates import WeightUpdater
from producers.rendering.tokenizer import Tokenizer
from producers.workflows.base import Workflow
from producers.workflows.trajectory_builder import SampledCompletion
from schemas.config import TidemillConfig
from schemas.lifecycle import StopFlag, until_stopped
from schemas.messages import Task

FULL = 0.95
"""Share of the cache that is planned with; the rest is for samples that grow longer than those before."""
MEMORY = 50
"""About so many samples, the newest, make up the mean."""


class Lengths:
    """Mean need of a sample in tokens; at first, when none is known, that of the longest there may be."""

    def __init__(self, longest: int) -> None:
        self.mean = float(longest)
        self._seen = 1

    def add(self, tokens: int) -> None:
        """One more sample is finished."""
        self._seen = min(self._seen + 1, MEMORY)
        self.mean += (tokens - self.mean) / self._seen


def need(sample: SampledCompletion, n: int) -> int:
    """Tokens that a sample held in the cache, of the prompt its share as one of ``n``."""
    prompt = sample.loss_mask.index(1) if 1 in sample.loss_mask else len(sample.tokens)
    return len(sample.tokens) - prompt + prompt // n


def room(most: int, in_flight: int, load: KvCacheUsage | None, mean: float, n: int) -> int:
    """Groups of ``n`` samples to take now.

    most: samples in flight, of the configuration; the last group may go beyond. load: of the engine, None where memory
    is no limit. mean: tokens that a sample is expected to need. A generator with nothing to do takes something,
    whatever that is expected to need. One in which most samples wait for their first token takes nothing: others may
    be quicker.
    """
    if in_flight >= most:
        return 0
    groups = max(1, (most - in_flight) // n)
    if load is None:
        return groups
    if 2 * load.waiting > in_flight:
        return 0
    blocks = max(1, math.ceil(mean / load.block))
    each = max(float(blocks * load.block), load.used / in_flight if in_flight else 0.0)
    fitting = max(0, int(FULL * load.tokens / each) - in_flight) // n
    return min(groups, fitting if in_flight else max(1, fitting))


ABORT_AGAIN_S = 0.2
"""A job may come to the engine after everything in it was aborted: then it is aborted again."""


class TaskLoop:
    """``in_flight`` counts samples taken and not yet published; ``tokens`` those generated so far."""

    def __init__(
        self,
        config: TidemillConfig,
        name: str,
        broker: Broker,
        engine: Engine,
        tokenizer: Tokenizer,
        workflow: Workflow,
        updates: WeightUpdater,
        pause: PauseFollower,
    ) -> None:
        self._config = config
        self._engine = engine
        self._updates = updates
        self._pause = pause
        self._queue = broker.task_queue(name)
        self._saver = PartialSaver(broker.partials(name))
        self._context = GeneratorContext(
            run=config.run.name,
            name=name,
            queue=self._queue,
            partials=broker.partials(name),
            engine=engine,
            tokenizer=tokenizer,
            workflow=workflow,
            updates=updates,
            outbox=Outbox(self._queue),
            saver=self._saver,
        )
        self._services = broker.heartbeats
        self._lengths = Lengths(min(config.sampling.max_tokens, config.model.max_length))
        self._room = asyncio.Condition()
        self._jobs: set[asyncio.Task[None]] = set()
        self.in_flight = 0
        self.tokens = 0

    @property
    def most(self) -> int:
        """Samples in flight at once, by order or by the configuration."""
        return self._pause.control.concurrency or self._config.generator.max_samples

    def renew(self) -> None:
        """Keep the leases of what is in progress; called from the presence thread."""
        self._queue.renew_leases()

    async def run(self, stop: StopFlag) -> None:
        """Until stop; then everything unfinished is handed back, while the last read may still be waiting."""
        async with asyncio.TaskGroup() as group:
            pulling = group.create_task(self._pull(group, stop))
            await until_stopped(stop, asyncio.wait({pulling}))
            while self._jobs or not pulling.done():
                await self._engine.abort_all()
                await asyncio.wait({pulling, *self._jobs}, timeout=ABORT_AGAIN_S)
        await self._saver.close()

    async def _pull(self, group: asyncio.TaskGroup, stop: StopFlag) -> None:
        """Take tasks while there is room, and weights to begin with."""
        lease_s = self._config.generator.lease_s
        next_claim = time.monotonic()
        while not stop and await self._updates.ready() and await self._pause.wait_open():
            count = await until_stopped(stop, self._some_room())
            if not count:
                continue
            deliveries: list[Delivery[Task]] = []
            if time.monotonic() >= next_claim:
                deliveries = await asyncio.to_thread(self._queue.claim_stale, lease_s, count)
                next_claim = time.monotonic() + lease_s / 2
            if not deliveries:
                deliveries = await self._evaluations()
            if not deliveries:
                deliveries = await asyncio.to_thread(self._queue.read, count, evaluations=self._config.eval is None)
            for delivery in deliveries:
                self.in_flight += delivery.message.n
                job = group.create_task(self._work(delivery, stop))
                self._jobs.add(job)
                job.add_done_callback(self._jobs.discard)

    async def _some_room(self) -> int:
        """Groups there is room for; waits up to a second for some, because orders change ``most``."""
        try:
            async with asyncio.timeout(1.0), self._room:
                await self._room.wait_for(lambda: self._room_now(self._config.sampling.n) > 0)
        except TimeoutError:
            return 0
        return self._room_now(self._config.sampling.n)

    def _room_now(self, n: int) -> int:
        return room(self.most, self.in_flight, self._engine.cache_usage(), self._lengths.mean, n)

    async def _evaluations(self) -> list[Delivery[Task]]:
        """Evaluation tasks for the weights in use, or those for older ones that no generator has any more."""
        if self._config.eval is None:
            return []
        version, count = self._updates.version, self._room_now(self._config.eval.sampling.n)
        found = await asyncio.to_thread(self._queue.take_evaluations, version, count)
        if not found.taken and 0 <= found.pending < version:
            beats = await asyncio.to_thread(self._services.list)
            if not still_at(found.pending, beats):
                found = await asyncio.to_thread(self._queue.take_evaluations, version, count, late=True)
        return found.taken

    async def _work(self, delivery: Delivery[Task], stop: StopFlag) -> None:
        task = delivery.message
        left = task.n

        async def published(sample: SampledCompletion) -> None:
            nonlocal left
            left -= 1
            self.tokens += sum(sample.loss_mask)
            self._lengths.add(need(sample, task.n))
            await self._give_room(1)

        try:
            async with self._updates.using(delivery.version, task.kind == "eval") as ready:
                if ready and not stop:
                    await Rollout(self._context, delivery, published).run()
                else:
                    await asyncio.to_thread(self._queue.return_task, delivery, task)
        finally:
            self._queue.release(delivery)
            await self._give_room(left)

    async def _give_room(self, samples: int) -> None:
        async with self._room:
            self.in_flight -= samples
            self._room.notify_all()
