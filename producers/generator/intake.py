"""Tasks of one generator: pull them when there is room, run each as a job, end all of them when asked to."""

from __future__ import annotations

import asyncio
import time

from broker.client import Broker
from broker.queues import Delivery
from producers.engines.base import Engine
from producers.generator.capacity import Lengths, room
from producers.generator.job import Job, Shop
from producers.generator.outbox import Outbox
from producers.generator.pinning import still_at
from producers.generator.saver import Saver
from producers.generator.updates import Updates
from producers.generator.valve import Valve
from producers.workflows.base import Sample, Tokenizer, Workflow
from schemas.config import TidemillConfig
from schemas.lifecycle import StopFlag
from schemas.messages import Task

ABORT_AGAIN_S = 0.2
"""A job may come to the engine after everything in it was aborted: then it is aborted again."""


class Intake:
    """``in_flight`` counts samples taken and not yet published; ``tokens`` those generated so far."""

    def __init__(
        self,
        config: TidemillConfig,
        name: str,
        broker: Broker,
        engine: Engine,
        tokenizer: Tokenizer,
        workflow: Workflow,
        updates: Updates,
        valve: Valve,
    ) -> None:
        self._config = config
        self._engine = engine
        self._updates = updates
        self._valve = valve
        self._queue = broker.tasks(name)
        self._saver = Saver(broker.partials(name))
        self._shop = Shop(
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
        self._services = broker.services
        self._evaluates = config.eval is not None
        self._lengths = Lengths()
        self._room = asyncio.Condition()
        self._jobs: set[asyncio.Task[None]] = set()
        self.in_flight = 0
        self.tokens = 0

    @property
    def most(self) -> int:
        """Samples in flight at once, by order or by the configuration."""
        return self._valve.orders.concurrency or self._config.generator.max_samples

    def renew(self) -> None:
        """Keep the leases of what is in progress; called from the presence thread."""
        self._queue.renew()

    async def run(self, stop: StopFlag) -> None:
        """Until stop; then everything unfinished is handed back."""
        lease_s = self._config.generator.lease_s
        await self._updates_ready(stop)
        async with asyncio.TaskGroup() as group:
            next_claim = time.monotonic()
            while not stop:
                if not await self._valve.wait_open(1.0):
                    continue
                free = await self._free()
                if free == 0:
                    continue
                count = max(1, free // self._config.sampling.n)
                deliveries: list[Delivery[Task]] = []
                if time.monotonic() >= next_claim:
                    deliveries = await asyncio.to_thread(self._queue.claim_stale, lease_s, count)
                    next_claim = time.monotonic() + lease_s / 2
                if not deliveries:
                    deliveries = await self._evaluations(free)
                if not deliveries:
                    deliveries = await asyncio.to_thread(self._queue.read, count, evaluations=not self._evaluates)
                for delivery in deliveries:
                    self.in_flight += delivery.message.n
                    job = group.create_task(self._work(delivery))
                    self._jobs.add(job)
                    job.add_done_callback(self._jobs.discard)
            while self._jobs:
                await self._engine.abort_all()
                await asyncio.wait(self._jobs, timeout=ABORT_AGAIN_S)
        await self._saver.close()

    async def _updates_ready(self, stop: StopFlag) -> None:
        """No task is taken before the first weights are in and checked."""
        while not stop:
            try:
                async with asyncio.timeout(1.0):
                    await self._updates.at_least(0)
                return
            except TimeoutError:
                continue

    async def _free(self) -> int:
        """Samples there is room for; waits up to a second for some."""
        try:
            async with asyncio.timeout(1.0), self._room:
                await self._room.wait_for(lambda: self._room_now() > 0)
        except TimeoutError:
            return 0
        return self._room_now()

    def _room_now(self) -> int:
        return room(self.most, self.in_flight, self._engine.load_now(), self._lengths.mean)

    async def _evaluations(self, free: int) -> list[Delivery[Task]]:
        """Evaluation tasks for the weights in use, or those for older ones that no generator has any more."""
        if not self._evaluates:
            return []
        version = self._updates.version
        found = await asyncio.to_thread(self._queue.take_evaluations, version, free)
        if not found.taken and 0 <= found.pending < version:
            beats = await asyncio.to_thread(self._services.list)
            if not still_at(found.pending, beats):
                found = await asyncio.to_thread(self._queue.take_evaluations, version, free, late=True)
        return found.taken

    async def _work(self, delivery: Delivery[Task]) -> None:
        task = delivery.message
        evaluating = task.kind == "eval"
        left = task.n

        async def freed(sample: Sample) -> None:
            nonlocal left
            left -= 1
            self.tokens += sum(sample.loss_mask)
            self._lengths.add(len(sample.tokens))
            await self._give_room(1)

        try:
            if not await self._updates.at_least(delivery.version):
                await asyncio.to_thread(self._queue.hand_back, delivery, task)
                return
            if evaluating:
                self._updates.evaluation(+1)
            try:
                await Job(self._shop, delivery, freed).run()
            finally:
                if evaluating:
                    self._updates.evaluation(-1)
        finally:
            self._queue.done(delivery)
            await self._give_room(left)

    async def _give_room(self, samples: int) -> None:
        async with self._room:
            self.in_flight -= samples
            self._room.notify_all()
