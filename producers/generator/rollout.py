"""A rollout: run the workflow for one task, publish each sample when it is finished, hand back the rest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec
import structlog

from broker.client import Broker
from broker.queues.consumer_group import Delivery
from broker.queues.partials import Partials
from broker.queues.tasks import TaskQueue
from producers.engines.base import Engine
from producers.generator.outbox import Outbox, PartialSaver
from producers.generator.pause import PauseFollower
from producers.generator.weight_updates import WeightUpdater
from producers.rendering.tokenizer import HfTokenizer, Tokenizer
from producers.workflows.base import RolloutContext, Workflow, find_workflow
from producers.workflows.trajectory_builder import SampledCompletion
from schemas.codec import Array
from schemas.config import TidemillConfig
from schemas.errors import DataError
from schemas.messages import Partial, Span, Task

log = structlog.get_logger()


@dataclass(frozen=True)
class GeneratorContext:
    """What the parts of one generator share: its engine, what it generates with, and its access to the broker."""

    config: TidemillConfig
    name: str
    broker: Broker
    engine: Engine
    tokenizer: Tokenizer
    workflow: Workflow
    pause: PauseFollower
    updates: WeightUpdater
    queue: TaskQueue
    partials: Partials
    outbox: Outbox
    saver: PartialSaver

    @classmethod
    def create(
        cls,
        config: TidemillConfig,
        name: str,
        broker: Broker,
        engine: Engine,
        pause: PauseFollower,
        updates: WeightUpdater,
    ) -> GeneratorContext:
        """Load the tokenizer and the workflow that the configuration names, and open the queues."""
        chosen = config.generator.workflow
        workflow = find_workflow(chosen.name, chosen.args, config.base)()
        tokenizer = HfTokenizer(config.model.path, config.model.trust_remote_code)
        queue, partials = broker.task_queue(name), broker.partials(name)
        outbox, saver = Outbox(queue), PartialSaver(partials)
        return cls(config, name, broker, engine, tokenizer, workflow, pause, updates, queue, partials, outbox, saver)


class Rollout:
    """Runs one delivery of a task once. ``published`` is called with each sample that the broker has."""

    def __init__(
        self,
        context: GeneratorContext,
        delivery: Delivery[Task],
        published: Callable[[SampledCompletion], Awaitable[None]],
    ) -> None:
        self._context = context
        self._delivery = delivery
        self._published = published
        self._task = delivery.message
        self._begun = time.monotonic()
        self._ended: set[int] = set()
        self._unfinished: list[Partial] = []

    async def run(self) -> None:
        """Return when every sample is published, failed or handed back."""
        context, task = self._context, self._task
        missing: Sequence[int] = range(task.n)
        if self._delivery.redelivered:
            missing = await asyncio.to_thread(context.queue.find_missing, task)
            saved = await asyncio.to_thread(context.partials.load_partials, task.task_id, missing)
            task = msgspec.structs.replace(task, partials=longest([*task.partials, *saved]))
        rollout = RolloutContext(context.engine, context.tokenizer, task, missing, self._save)
        try:
            async with asyncio.TaskGroup() as leaving:
                try:
                    async for sample in context.workflow.run(rollout):
                        self._ended.add(sample.index)
                        leaving.create_task(self._deliver(sample, time.monotonic() - self._begun))
                except (DataError, ValueError) as error:
                    await self._fail(missing, str(error))
        finally:
            context.saver.forget(task)
        if self._unfinished:
            partial = msgspec.structs.replace(self._task, partials=self._unfinished)
            await asyncio.to_thread(context.queue.return_task, self._delivery, partial)

    async def _deliver(self, sample: SampledCompletion, seconds: float) -> None:
        """Weights that came in under the sample must have passed their probe before any token of theirs leaves."""
        context = self._context
        good = await context.updates.wait_trusted(sample.spans, len(sample.tokens))
        if sample.finish == "abort" or good < len(sample.tokens):
            self._unfinished.append(sample.to_partial(good))
            return
        await context.outbox.publish(sample.to_trajectory(self._task, context.config.run.name, context.name, seconds))
        await self._published(sample)

    def _save(self, partial: Partial) -> None:
        good = self._context.updates.trusted_length(partial.spans, len(partial.tokens))
        if good:
            self._context.saver.save_soon(self._delivery, head(partial, good))

    async def _fail(self, missing: Sequence[int], reason: str) -> None:
        """A prompt that can't be generated for: each sample that is not there becomes a dead letter."""
        log.warning("samples failed", task_id=self._task.task_id, reason=reason)
        for sample in missing:
            if sample not in self._ended:
                await asyncio.to_thread(self._context.queue.fail_sample, self._task.task_id, sample, reason)


def longest(partials: Sequence[Partial]) -> list[Partial]:
    """The longest partial of each sample, the first of equals."""
    found: dict[int, Partial] = {}
    for partial in partials:
        if partial.sample not in found or len(partial.tokens) > len(found[partial.sample].tokens):
            found[partial.sample] = partial
    return list(found.values())


def head(partial: Partial, length: int) -> Partial:
    """The first ``length`` tokens of a partial sample."""
    if length == len(partial.tokens):
        return partial
    return Partial(
        sample=partial.sample,
        tokens=Array.of(partial.tokens.numpy()[:length], "i4"),
        logprobs=Array.of(partial.logprobs.numpy()[:length], "f4"),
        spans=[Span(s.version, s.start, min(s.end, length)) for s in partial.spans if s.start < length],
    )
