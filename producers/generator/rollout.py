"""One task in one generator: run the workflow, publish each sample when it is finished, hand back the rest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec
import structlog

from broker.queues.consumer_group import Delivery
from broker.queues.partials import Partials
from broker.queues.tasks import TaskQueue
from producers.engines.base import Engine
from producers.generator.outbox import Outbox, PartialSaver
from producers.generator.weight_updates import WeightUpdater
from producers.workflows.base import SampledCompletion, Tokenizer, Workflow
from schemas.codec import Array
from schemas.errors import DataError
from schemas.messages import Partial, Span, Task, Trajectory

log = structlog.get_logger()


@dataclass(frozen=True)
class RolloutServices:
    """What all jobs of a generator share."""

    run: str
    name: str
    queue: TaskQueue
    partials: Partials
    engine: Engine
    tokenizer: Tokenizer
    workflow: Workflow
    updates: WeightUpdater
    outbox: Outbox
    saver: PartialSaver


class Rollout:
    """One delivery of a task, run once. ``freed`` hears of each sample that was published."""

    def __init__(
        self, shop: RolloutServices, delivery: Delivery[Task], freed: Callable[[SampledCompletion], Awaitable[None]]
    ) -> None:
        self._shop = shop
        self._delivery = delivery
        self._freed = freed
        self._task = delivery.message
        self._begun = time.monotonic()
        self._ended: set[int] = set()
        self._unfinished: list[Partial] = []

    async def run(self) -> None:
        """Until every sample is published, failed or handed back."""
        shop, task = self._shop, self._task
        missing: Sequence[int] = range(task.n)
        if self._delivery.again:
            missing = await asyncio.to_thread(shop.queue.missing, task)
            saved = await asyncio.to_thread(shop.partials.load, task.task_id, missing)
            task = msgspec.structs.replace(task, partials=longest([*task.partials, *saved]))
        try:
            async with asyncio.TaskGroup() as leaving:
                try:
                    async for item in shop.workflow.run(shop.engine, shop.tokenizer, task, missing):
                        if isinstance(item, Partial):
                            self._save(item)
                        else:
                            self._ended.add(item.index)
                            leaving.create_task(self._deliver(item, time.monotonic() - self._begun))
                except (DataError, ValueError) as error:
                    await self._fail(missing, str(error))
        finally:
            shop.saver.forget(task)
        if self._unfinished:
            partial = msgspec.structs.replace(self._task, partials=self._unfinished)
            await asyncio.to_thread(shop.queue.hand_back, self._delivery, partial)

    async def _deliver(self, sample: SampledCompletion, seconds: float) -> None:
        """Weights that came in under the sample must have passed their probe before any token of theirs leaves."""
        good = await self._shop.updates.trusted(sample.spans, len(sample.tokens))
        if sample.finish == "abort" or good < len(sample.tokens):
            self._unfinished.append(partial_of(sample, good))
            return
        await self._shop.outbox.publish(trajectory_of(self._shop, self._task, sample, seconds))
        await self._freed(sample)

    def _save(self, partial: Partial) -> None:
        good = self._shop.updates.trusted_now(partial.spans, len(partial.tokens))
        if good:
            self._shop.saver.grown(self._delivery, head(partial, good))

    async def _fail(self, missing: Sequence[int], reason: str) -> None:
        """A prompt that can't be generated for: each sample that is not there becomes a dead letter."""
        log.warning("samples failed", task_id=self._task.task_id, reason=reason)
        for sample in missing:
            if sample not in self._ended:
                await asyncio.to_thread(self._shop.queue.fail_sample, self._task.task_id, sample, reason)


def longest(partials: Sequence[Partial]) -> list[Partial]:
    """Of each sample what there is most of, the first of equals."""
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


def trajectory_of(shop: RolloutServices, task: Task, sample: SampledCompletion, seconds: float) -> Trajectory:
    """The message that a finished sample travels as."""
    return Trajectory(
        run=shop.run,
        task_id=task.task_id,
        sample=sample.index,
        kind=task.kind,
        tokens=Array.of(sample.tokens, "i4"),
        loss_mask=Array.of(sample.loss_mask, "u1"),
        logprobs=Array.of(sample.logprobs, "f4"),
        spans=sample.spans,
        turns=sample.turns,
        finish=sample.finish,
        prompt=sample.prompt,
        completion=sample.completion,
        generator=shop.name,
        seconds=seconds,
        data={**task.data, **sample.data},
    )


def partial_of(sample: SampledCompletion, end: int | None = None) -> Partial:
    """What an unfinished sample had generated up to ``end``, positions counted from its first generated token."""
    generated = [i for i, mask in enumerate(sample.loss_mask) if mask]
    start = generated[0] if generated else len(sample.tokens)
    end = max(start, len(sample.tokens) if end is None else end)
    return Partial(
        sample=sample.index,
        tokens=Array.of(sample.tokens[start:end], "i4"),
        logprobs=Array.of(sample.logprobs[start:end], "f4"),
        spans=[Span(s.version, s.start - start, min(s.end, end) - start) for s in sample.spans if s.start < end],
    )
