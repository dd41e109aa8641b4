"""The task loop of a generator: it decides how many tasks to take, and runs each as a rollout."""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import structlog

from broker.queues.consumer_group import Delivery
from producers.engines.base import KvCacheUsage
from producers.generator.context import GeneratorContext
from producers.generator.eval_versions import is_served
from producers.generator.rollout import Rollout
from schemas.config.generator import ENDPOINT_WORKFLOWS, LIVE
from schemas.errors import TidemillError
from schemas.messages import Task, Trajectory
from schemas.system.lifecycle import StopFlag, until_stopped

ABORT_AGAIN_S = 0.2
"""Seconds between two aborts of the engine at the end: a rollout may submit a request after the first."""
FULL = 0.95
"""Share of the cache that is filled; the rest is for samples that grow longer than earlier ones."""
MEMORY = 50
"""The mean is over about this many of the newest samples."""
RATE_S = 5.0
"""Seconds over which the rate of tokens is measured."""

log = structlog.get_logger()


class MeanSampleSize:
    """Mean tokens that a sample needs; ``longest``, the most possible, before the first is known."""

    def __init__(self, longest: int) -> None:
        self.tokens = float(longest)
        self._seen = 1

    def add(self, tokens: int) -> None:
        """Take the tokens that a sample needed into the mean."""
        self._seen = min(self._seen + 1, MEMORY)
        self.tokens += (tokens - self.tokens) / self._seen


class RateMeter:
    """The rate of a growing count over the last RATE_S."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()

    def rate(self, count: int) -> float:
        """Add the current count; return counts per second over the measured time."""
        now = time.monotonic()
        self._points.append((now, count))
        while len(self._points) > 2 and now - self._points[0][0] > RATE_S:
            self._points.popleft()
        then, before = self._points[0]
        return (count - before) / (now - then) if now > then else 0.0


def cache_need(loss_mask: bytes, n: int) -> int:
    """Return the tokens that a sample held in the cache, with its share of a prompt that ``n`` samples share."""
    first = loss_mask.find(1)
    prompt = len(loss_mask) if first < 0 else first
    return len(loss_mask) - prompt + prompt // n


def groups_to_take(limit: int, in_flight: int, cache: KvCacheUsage | None, mean: float, n: int) -> int:
    """Return how many groups of ``n`` samples to take now: up to the limit, and only as many as fit into the cache.

    limit: the most samples in flight; the last group may exceed it. cache: None if memory is not a limit. mean:
    tokens that a sample is expected to need. An idle generator always takes a group, whatever its expected size. A
    generator in which most samples wait for their first token takes none, since another one may have capacity.
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
    """Takes tasks up to the generator's capacity, runs them as rollouts, and ends these at the end.

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
        self._is_agent = self._config.generator.workflow.name in ENDPOINT_WORKFLOWS
        self._rate = RateMeter()
        self.in_flight = 0
        self.tokens = 0

    @property
    def limit(self) -> int:
        """The most samples in flight at once, by order or by configuration; 0 while this generator is quarantined."""
        if self._context.is_quarantined:
            return 0
        generator = self._config.generator
        return self._context.orders.capacity(generator.agents.episodes if self._is_agent else generator.max_samples)

    def metrics(self) -> dict[str, float]:
        """Return rates and counts, for the heartbeat."""
        return {
            "tokens_per_s": self._rate.rate(self.tokens),
            "samples_in_flight": float(self.in_flight),
            "max_samples": float(self.limit),
            "tokens": float(self.tokens),
        }

    def renew(self) -> None:
        """Renew all tasks' leases, and stop tasks that others have taken over; called from the heartbeat thread."""
        taken = self._queue.renew_leases()
        if taken and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop_taken, taken)

    def _stop_taken(self, entries: Sequence[bytes]) -> None:
        for entry in entries:
            if rollout := self._by_entry.get(entry):
                log.warning("a task's lease ended: another generator has taken it over", entry=entry.decode())
                rollout.stop()

    async def run(self, stop: StopFlag) -> None:
        """Take and run tasks until stop; then return all unfinished samples to the queue."""
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            taking = group.create_task(self._take_tasks(group, stop))
            await until_stopped(stop, asyncio.wait({taking}))
            if self._is_agent and self._rollouts and self._config.generator.workflow.name != LIVE:
                await self._let_episodes_end()
            for rollout in self._by_entry.values():
                rollout.interrupt()
            while self._rollouts or not taking.done():
                await self._context.engine.abort_all()
                await asyncio.wait({taking, *self._rollouts}, timeout=ABORT_AGAIN_S)
        await self._context.saver.close()

    async def _let_episodes_end(self) -> None:
        """Wait up to agents.grace_s for episodes to end, unless the run is finished and would train on none of them."""
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
        """Take tasks whenever there is capacity, checked weights, and no pause."""
        lease_s = self._config.generator.lease_s
        next_claim = time.monotonic()
        while not stop and await self._updates.wait_ready() and await self._context.orders.wait_open():
            count = await until_stopped(stop, self._wait_capacity())
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

    async def _wait_capacity(self) -> int:
        """Wait for capacity; return how many groups to take, 0 after a second, because orders change ``limit``."""
        try:
            async with asyncio.timeout(1.0), self._freed:
                await self._freed.wait_for(lambda: self._groups_to_take(self._config.sampling.n) > 0)
        except TimeoutError:
            return 0
        return self._groups_to_take(self._config.sampling.n)

    def _groups_to_take(self, n: int) -> int:
        # An agent uses the engine only during its requests: these are counted when it makes them.
        cache = None if self._is_agent else self._context.engine.cache_usage()
        return groups_to_take(self.limit, self.in_flight, cache, self._sample_size.tokens, n)

    async def _take_evaluations(self) -> list[Delivery[Task]]:
        """Take evaluation tasks for the weights in use, or for older weights that no generator has."""
        evaluation = self._config.eval
        if evaluation is None:
            return []
        version = self._updates.version
        count = self._groups_to_take(max(evaluation.sampling_of(part).n for part in evaluation.dataset))
        evaluations = await asyncio.to_thread(self._queue.take_evaluations, version, count)
        if not evaluations.taken and 0 <= evaluations.pending < version:
            heartbeats = await asyncio.to_thread(self._context.broker.heartbeats.list)
            if not is_served(evaluations.pending, heartbeats):
                evaluations = await asyncio.to_thread(self._queue.take_evaluations, version, count, late=True)
        return evaluations.taken

    async def _run_task(self, delivery: Delivery[Task], stop: StopFlag) -> None:
        task = delivery.message
        unpublished = task.n

        async def published(sample: Trajectory) -> None:
            nonlocal unpublished
            unpublished -= 1
            self.tokens += sample.sampled_tokens
            self._sample_size.add(cache_need(sample.loss_mask.data, task.n))
            await self._free(1)

        rollout = self._by_entry[delivery.entry_id] = Rollout(self._context, delivery, published, stop)
        try:
            async with self._updates.using(delivery.version, task.kind == "eval") as ready:
                if ready and not stop and not self._context.orders.is_asleep:
                    await rollout.run()
                else:
                    await asyncio.to_thread(self._queue.return_task, delivery, task)
        finally:
            if self._by_entry.get(delivery.entry_id) is rollout:
                del self._by_entry[delivery.entry_id]
                self._queue.release(delivery)
            await self._free(unpublished)

    @asynccontextmanager
    async def reserve(self, samples: int) -> AsyncIterator[None]:
        """Wait until there is capacity for ``samples`` beside those of tasks, and hold it in the block."""
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
