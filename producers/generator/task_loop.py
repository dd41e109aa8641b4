"""The task loop of a generator: how many tasks it takes, and the run of each as a rollout."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import structlog

from broker.queues.consumer_group import Delivery
from producers.engines.base import KvCacheUsage
from producers.generator.eval_versions import still_at
from producers.generator.rollout import GeneratorContext, Rollout
from schemas.errors import TidemillError
from schemas.messages import Task, Trajectory
from schemas.system.lifecycle import StopFlag, until_stopped

ABORT_AGAIN_S = 0.2
"""A rollout may come to the engine after everything in it was aborted: then it is aborted again."""
FULL = 0.95
"""Share of the cache that is given out; the rest is for samples that grow longer than those before."""
MEMORY = 50
"""The mean is of about this many samples, the newest."""

log = structlog.get_logger()


class MeanSampleSize:
    """Mean of what samples need in tokens; before any is known, what the ``longest`` possible one needs."""

    def __init__(self, longest: int) -> None:
        self.tokens = float(longest)
        self._seen = 1

    def add(self, tokens: int) -> None:
        """Count one more finished sample."""
        self._seen = min(self._seen + 1, MEMORY)
        self.tokens += (tokens - self.tokens) / self._seen


def cache_need(loss_mask: bytes, n: int) -> int:
    """Return the tokens that a sample held in the cache, with its share of a prompt that ``n`` samples have."""
    first = loss_mask.find(1)
    prompt = len(loss_mask) if first < 0 else first
    return len(loss_mask) - prompt + prompt // n


def groups_to_take(limit: int, in_flight: int, cache: KvCacheUsage | None, mean: float, n: int) -> int:
    """Return how many groups of ``n`` samples to take now: up to the limit, and only what the cache has room for.

    limit: samples in flight, of the configuration; the last group may go beyond. cache: None where memory is no
    limit. mean: tokens that a sample is expected to need. A generator with nothing to do takes something, whatever
    that is expected to need. One in which most samples wait for their first token takes nothing: what it took
    beyond its room would wait while another generator has some.
    """
    if in_flight >= limit:
        return 0
    groups = max(1, (limit - in_flight) // n)
    if cache is None:
        return groups
    if 2 * cache.waiting > in_flight:
        return 0
    blocks = max(1, math.ceil(mean / cache.block))
    each = max(float(blocks * cache.block), cache.used / in_flight if in_flight else 0.0)
    fitting = max(0, int(FULL * cache.tokens / each) - in_flight) // n
    return min(groups, fitting if in_flight else max(1, fitting))


class TaskLoop:
    """Takes tasks for which there is room, runs each as a rollout, and ends all of them when the generator ends.

    in_flight: samples taken and not yet published. tokens: generated and published so far.
    """

    def __init__(self, context: GeneratorContext) -> None:
        self._context = context
        self._config = context.config
        self._queue = context.queue
        self._updates = context.updates
        self._sample_size = MeanSampleSize(min(self._config.sampling.max_tokens, self._config.model.max_length))
        self._freed = asyncio.Condition()
        self._rollouts: set[asyncio.Task[None]] = set()
        self._by_entry: dict[bytes, Rollout] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_agent = self._config.generator.workflow.name == "agent"
        evaluation = self._config.eval
        self._most_held_out = max(evaluation.sampling_of(one).n for one in evaluation.dataset) if evaluation else 1
        self.in_flight = 0
        self.tokens = 0

    @property
    def limit(self) -> int:
        """Samples in flight at once, by order or by the configuration."""
        generator = self._config.generator
        return self._context.pause.control.concurrency or (
            generator.agents.episodes if self._is_agent else generator.max_samples
        )

    def renew(self) -> None:
        """Keep the leases of what is in progress, and stop what another generator has taken over meanwhile.

        Called from the heartbeat thread.
        """
        taken = self._queue.renew_leases()
        if taken and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop_taken, taken)

    def _stop_taken(self, entries: Sequence[bytes]) -> None:
        for entry in entries:
            if rollout := self._by_entry.get(entry):
                log.warning("a task was silent for its lease, another generator has it now", entry=entry.decode())
                rollout.stop()

    async def run(self, stop: StopFlag) -> None:
        """Work until stop; then everything unfinished is handed back, while the last read may still be waiting."""
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            taking = group.create_task(self._take_tasks(group, stop))
            await until_stopped(stop, asyncio.wait({taking}))
            if self._is_agent and self._rollouts:
                await self._let_episodes_end()
            for rollout in self._by_entry.values():
                rollout.interrupt()
            while self._rollouts or not taking.done():
                await self._context.engine.abort_all()
                await asyncio.wait({taking, *self._rollouts}, timeout=ABORT_AGAIN_S)
        await self._context.saver.close()

    async def _let_episodes_end(self) -> None:
        """Give episodes that are about to end the time to; none when the run is finished: nobody trains on them."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.generator.agents.grace_s):
                if not await asyncio.to_thread(self._is_run_finished):
                    await asyncio.wait({*self._rollouts})

    def _is_run_finished(self) -> bool:
        try:
            return self._context.broker.run_control.read_finished_steps() is not None
        except TidemillError:
            return False

    async def _take_tasks(self, group: asyncio.TaskGroup, stop: StopFlag) -> None:
        """Take tasks while there is room, and weights to begin with."""
        lease_s = self._config.generator.lease_s
        next_claim = time.monotonic()
        while not stop and await self._updates.wait_ready() and await self._context.pause.wait_open():
            count = await until_stopped(stop, self._wait_room())
            if not count:
                continue
            deliveries: list[Delivery[Task]] = []
            if time.monotonic() >= next_claim:
                deliveries = await asyncio.to_thread(self._queue.claim_stale, lease_s, count)
                next_claim = time.monotonic() + lease_s / 2
            if not deliveries:
                deliveries = await self._take_evaluations()
            if not deliveries:
                deliveries = await asyncio.to_thread(self._queue.read, count, evaluations=self._config.eval is None)
            for delivery in deliveries:
                self.in_flight += delivery.message.n
                rollout = group.create_task(self._run_task(delivery, stop))
                self._rollouts.add(rollout)
                rollout.add_done_callback(self._rollouts.discard)

    async def _wait_room(self) -> int:
        """Groups to take; waits up to a second for room, because orders change ``limit``."""
        try:
            async with asyncio.timeout(1.0), self._freed:
                await self._freed.wait_for(lambda: self._groups_to_take(self._config.sampling.n) > 0)
        except TimeoutError:
            return 0
        return self._groups_to_take(self._config.sampling.n)

    def _groups_to_take(self, n: int) -> int:
        # Agents hold places in the engine only while they ask for something: these are counted where they ask.
        cache = None if self._is_agent else self._context.engine.cache_usage()
        return groups_to_take(self.limit, self.in_flight, cache, self._sample_size.tokens, n)

    async def _take_evaluations(self) -> list[Delivery[Task]]:
        """Evaluation tasks for the weights in use, or those for older ones that no generator has any more."""
        if self._config.eval is None:
            return []
        version, count = self._updates.version, self._groups_to_take(self._most_held_out)
        found = await asyncio.to_thread(self._queue.take_evaluations, version, count)
        if not found.taken and 0 <= found.pending < version:
            beats = await asyncio.to_thread(self._context.broker.heartbeats.list)
            if not still_at(found.pending, beats):
                found = await asyncio.to_thread(self._queue.take_evaluations, version, count, late=True)
        return found.taken

    async def _run_task(self, delivery: Delivery[Task], stop: StopFlag) -> None:
        task = delivery.message
        left = task.n

        async def published(sample: Trajectory) -> None:
            nonlocal left
            left -= 1
            self.tokens += sample.loss_mask.data.count(1)
            self._sample_size.add(cache_need(sample.loss_mask.data, task.n))
            await self._free(1)

        rollout = self._by_entry[delivery.entry_id] = Rollout(self._context, delivery, published, stop)
        try:
            async with self._updates.using(delivery.version, task.kind == "eval") as ready:
                if ready and not stop:
                    await rollout.run()
                else:
                    await asyncio.to_thread(self._queue.return_task, delivery, task)
        finally:
            if self._by_entry.get(delivery.entry_id) is rollout:
                del self._by_entry[delivery.entry_id]
                self._queue.release(delivery)
            await self._free(left)

    @asynccontextmanager
    async def places(self, samples: int) -> AsyncIterator[None]:
        """Wait for room for so many samples beside those of tasks, and hold it."""
        async with self._freed:
            await self._freed.wait_for(lambda: self.in_flight + samples <= self.limit)
            self.in_flight += samples
        try:
            yield
        finally:
            await self._free(samples)

    async def _free(self, samples: int) -> None:
        async with self._freed:
            self.in_flight -= samples
            self._freed.notify_all()
