"""Tasks of one generator: pull them when there is room, run the workflow, publish each sample when it is done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import structlog

from broker.client import Broker
from broker.queues import Delivery
from producers.engines.base import Engine
from producers.generator.updates import Updates
from producers.workflows.base import Sample, Tokenizer, Workflow
from schemas.codec import Array
from schemas.config import TidemillConfig
from schemas.errors import DataError, TidemillError
from schemas.lifecycle import StopFlag
from schemas.messages import Partial, Span, Task, Trajectory

log = structlog.get_logger()


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
    ) -> None:
        self._config = config
        self._name = name
        self._broker = broker
        self._engine = engine
        self._tokenizer = tokenizer
        self._workflow = workflow
        self._updates = updates
        self._queue = broker.tasks(name)
        self._room = asyncio.Condition()
        self._finished: list[tuple[int, list[Trajectory], asyncio.Future[None]]] = []
        self._publishing = False
        self.in_flight = 0
        self.tokens = 0

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
                free = await self._free()
                if free == 0:
                    continue
                count = max(1, free // self._config.sampling.n)
                deliveries: list[Delivery[Task]] = []
                if time.monotonic() >= next_claim:
                    deliveries = await asyncio.to_thread(self._queue.claim_stale, lease_s, count)
                    next_claim = time.monotonic() + lease_s / 2
                if not deliveries:
                    deliveries = await asyncio.to_thread(self._queue.read_evaluations, free)
                    # One that asks for newer weights than these must not keep them out.
                    running = any(item.version <= self._updates.version for item in deliveries)
                    await self._updates.expect_evaluations(running)
                if not deliveries:
                    deliveries = await asyncio.to_thread(self._queue.read, count)
                for delivery in deliveries:
                    self.in_flight += delivery.message.n
                    group.create_task(self._work(delivery))
            await self._engine.abort_all()

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
        most = self._config.generator.max_samples
        try:
            async with asyncio.timeout(1.0), self._room:
                await self._room.wait_for(lambda: self.in_flight < most)
        except TimeoutError:
            return 0
        return most - self.in_flight

    async def _work(self, delivery: Delivery[Task]) -> None:
        task = delivery.message
        evaluating = task.kind == "eval"
        try:
            if not await self._updates.at_least(delivery.version):
                await asyncio.to_thread(self._queue.hand_back, delivery, task)
                return
            if evaluating:
                await self._updates.evaluation(+1)
            try:
                await self._generate(delivery)
            finally:
                if evaluating:
                    await self._updates.evaluation(-1)
        finally:
            self._queue.done(delivery)
            async with self._room:
                self.in_flight -= task.n
                self._room.notify_all()

    async def _generate(self, delivery: Delivery[Task]) -> None:
        task = delivery.message
        missing: Sequence[int] = range(task.n)
        if delivery.again:
            missing = await asyncio.to_thread(self._queue.missing, task)
        aborted: list[Sample] = []
        ready: list[Trajectory] = []
        started = time.monotonic()
        try:
            async for sample in self._workflow.run(self._engine, self._tokenizer, task, missing):
                if sample.finish == "abort":
                    aborted.append(sample)
                    continue
                self.tokens += sum(sample.loss_mask)
                ready.append(self._trajectory(task, sample, time.monotonic() - started))
        except (DataError, ValueError) as error:
            await self._fail(task, missing, ready, str(error))
        if ready:
            # Weights that came in under these samples must have passed their probe before they leave.
            newest = max((span.version for item in ready for span in item.spans), default=0)
            if await self._updates.at_least(newest):
                await self._publish(task.task_id, ready)
        if aborted:
            partial = Task(
                task_id=task.task_id,
                kind=task.kind,
                n=task.n,
                sampling=task.sampling,
                text=task.text,
                messages=task.messages,
                token_ids=task.token_ids,
                data=task.data,
                partials=[partial_of(sample) for sample in aborted],
            )
            await asyncio.to_thread(self._queue.hand_back, delivery, partial)

    async def _publish(self, task_id: int, ready: list[Trajectory]) -> None:
        """Hand samples over, together with whatever else is finished by then; returns when the broker has them."""
        done = asyncio.get_running_loop().create_future()
        self._finished.append((task_id, ready, done))
        if not self._publishing:
            self._publishing = True
            try:
                await self._publish_finished()
            finally:
                self._publishing = False
        await done

    async def _publish_finished(self) -> None:
        while self._finished:
            batch, self._finished = self._finished, []
            try:
                await asyncio.to_thread(self._queue.publish_all, [(task_id, ready) for task_id, ready, _ in batch])
            except TidemillError as error:
                for _, _, done in batch:
                    done.set_exception(error)
            else:
                for _, _, done in batch:
                    done.set_result(None)

    async def _fail(self, task: Task, missing: Sequence[int], ready: list[Trajectory], reason: str) -> None:
        """A prompt that can't be generated for: each sample that is not there becomes a dead letter."""
        log.warning("samples failed", task_id=task.task_id, reason=reason)
        done = {item.sample for item in ready}
        for sample in missing:
            if sample not in done:
                await asyncio.to_thread(self._queue.fail_sample, task.task_id, sample, reason)

    def _trajectory(self, task: Task, sample: Sample, seconds: float) -> Trajectory:
        return Trajectory(
            run=self._config.run.name,
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
            generator=self._name,
            seconds=seconds,
            data={**task.data, **sample.data},
        )


def partial_of(sample: Sample) -> Partial:
    """What an aborted single-turn sample had generated, positions counted from its first generated token."""
    generated = [i for i, mask in enumerate(sample.loss_mask) if mask]
    start = generated[0] if generated else len(sample.tokens)
    return Partial(
        sample=sample.index,
        tokens=Array.of(sample.tokens[start:], "i4"),
        logprobs=Array.of(sample.logprobs[start:], "f4"),
        spans=[Span(span.version, span.start - start, span.end - start) for span in sample.spans],
    )
