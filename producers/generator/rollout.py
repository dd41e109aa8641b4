"""A rollout: run the workflow for one task, publish each finished sample, return the unfinished ones to the queue."""

import asyncio
import functools
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
import structlog

from broker.queues.consumer_group import Delivery
from producers.conversation.calls import with_earlier
from producers.generator.context import GeneratorContext
from producers.workflows.base import FailedSample, RolloutContext, SaveDone, is_service_error
from producers.workflows.given_answer import give_answer
from producers.workflows.self_teacher import ask_self
from producers.workflows.trajectory_builder import SampledCompletion
from schemas.codec import Array
from schemas.errors import DataError, describe_error, printable
from schemas.messages import Call, Partial, Span, Task, Trajectory
from schemas.messages.moments import Noted, pack_noted, unpack
from schemas.system.lifecycle import StopFlag

P = TypeVar("P", Partial, Call)
IMAGE_TRIES = 3
"""How often an episode's images are stored before its sample fails, if the broker loses them each time."""

log = structlog.get_logger()


class Rollout:
    """One run of a delivered task. published: called with each accepted sample. ending: set to cut samples short."""

    def __init__(
        self,
        context: GeneratorContext,
        delivery: Delivery[Task],
        published: Callable[[Trajectory], Awaitable[None]],
        ending: StopFlag,
    ) -> None:
        self._context, self._delivery = context, delivery
        self._published, self._ending = published, ending
        self._task = delivery.message
        self._begun = time.monotonic()
        self._times_lent = context.orders.times_lent
        self._ended: set[int] = set()
        self._unfinished: list[Partial] = []
        self._fruitless = False
        self._sampling: asyncio.Task[str] | None = None
        self._stopped = False
        self._interrupted = asyncio.Event()
        self._claimed = time.time_ns()
        self._moments: dict[int, list[Noted]] | None = {} if context.config.trace is not None else None

    def interrupt(self) -> None:
        """Ask the workflow to yield its unfinished samples, because the generator ends soon."""
        self._interrupted.set()

    def stop(self) -> None:
        """Stop sampling, because another generator has taken over the task; finished samples are still published."""
        self._stopped = True
        if self._sampling is not None:
            self._sampling.cancel()

    async def run(self) -> None:
        """Return when every sample is published, failed or returned to the queue."""
        context, task = self._context, self._task
        missing: Sequence[int] = range(task.n)
        if self._delivery.redelivered:
            missing = await asyncio.to_thread(context.queue.find_missing, task)
            saved = await asyncio.to_thread(context.partials.load_partials, task.task_id, missing)
            task = self._task = msgspec.structs.replace(task, partials=longest([*task.partials, *saved]))
        spans = [part.spans for part in task.partials] + [call.spans for part in task.partials for call in part.calls]
        context.updates.weights.vouch(span.version for each in spans for span in each)
        files = await asyncio.to_thread(context.broker.images.fetch, {image.digest for image in task.images})
        if any(image.digest not in files for image in task.images):
            # The images were deleted with their group, or by a user.
            await self._fail(missing, "an image of its prompt is missing from the broker, or is not the stored one")
            return
        rollout = RolloutContext(
            context.engine,
            context.tokenizer,
            task,
            missing,
            self._save,
            context.report,
            self._interrupted,
            context.placeholders,
            files,
            self._moments,
        )
        try:
            async with asyncio.TaskGroup() as leaving:
                self._sampling = asyncio.create_task(self._run_workflow(rollout, leaving))
                if self._stopped:
                    self._sampling.cancel()
                reason = await self._reason_of_end(self._sampling)
                if not self._stopped:
                    await self._fail([sample for sample in missing if sample not in self._ended], reason)
        finally:
            context.saver.forget(task)
        if self._unfinished:
            partial = msgspec.structs.replace(self._task, partials=self._unfinished)
            await asyncio.to_thread(context.queue.return_task, self._delivery, partial, self._fruitless)

    async def _reason_of_end(self, sampling: asyncio.Task[str]) -> str:
        """Return why there are no more samples, nothing for a rollout that was stopped."""
        try:
            return await sampling
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if not self._stopped or this is None or this.cancelling():
                raise
            return ""

    async def _run_workflow(self, rollout: RolloutContext, leaving: asyncio.TaskGroup) -> str:
        """Deliver each sample that the workflow yields; return, at its end, why there are no more."""
        try:
            async for sample in self._samples(rollout):
                if type(sample.index) is not int or sample.index not in rollout.indices:
                    asked = ", ".join(map(str, rollout.indices))
                    raise DataError(f"yielded sample {sample.index!r}, but the samples asked for are {asked}")
                self._ended.add(sample.index)
                if isinstance(sample, FailedSample):
                    reason = self._describe(DataError(sample.reason))
                    leaving.create_task(self._fail([sample.index], reason, kind=sample.kind))
                else:
                    leaving.create_task(self._deliver(sample, time.monotonic() - self._begun, rollout))
        except asyncio.CancelledError as error:
            this = asyncio.current_task()
            if this is None or this.cancelling():
                raise
            return self._describe(error)
        except (Exception, SystemExit) as error:  # user code: any error of it fails this one task
            if is_service_error(error):
                raise
            return self._describe(error)
        return self._describe(DataError("ended without this sample"))

    def _samples(self, rollout: RolloutContext) -> AsyncIterator[SampledCompletion | FailedSample]:
        """Return the samples of the task: the dataset's own answer, or what the workflow makes."""
        context, task = self._context, rollout.task
        field = context.config.answer_field(task.dataset) if task.kind == "train" else None
        if field is None:
            return context.workflow.run(rollout)
        return give_answer(rollout, context.tokenizer, field, context.config.model.max_length)

    def _describe(self, error: BaseException) -> str:
        """Return why samples failed; log errors other than DataError with their traceback."""
        if not isinstance(error, DataError):
            log.warning("workflow failed", task_id=self._task.task_id, exc_info=error)
        text = printable(str(error)) if isinstance(error, DataError) else describe_error(error)
        return f"workflow {self._context.config.generator.workflow.name}: {text}"

    async def _deliver(self, sample: SampledCompletion, seconds: float, rollout: RolloutContext) -> None:
        """Publish a sample, or keep its trusted tokens for another generator; fail it alone if it can't be sent."""
        context = self._context
        try:
            given, problem = await self._ask_self(sample, rollout)
            trajectory = await self._prepare(sample, seconds)
        except NotFinite as error:
            await context.updates.report_not_finite(error.version)
            await self._fail([sample.index], str(error), error.version)
        except Exception as error:  # noqa: BLE001 - user code: the workflow may put anything into a sample
            await self._fail([sample.index], self._describe(error))
        else:
            if trajectory is not None:
                trajectory.teacher_logprobs, trajectory.teacher_problem = given, problem
                await self._publish(trajectory, sample.files)
                await self._published(trajectory)

    async def _ask_self(self, sample: SampledCompletion, rollout: RolloutContext) -> tuple[Array | None, str]:
        """Return what the policy says of its sample after another prompt, or why nothing, if the run asks for it."""
        context, task = self._context, rollout.task
        term = context.config.self_teacher(task.dataset) if task.kind == "train" else None
        if term is None or sample.finish == "abort":
            return None, ""
        within_s = context.config.generator.stall_s
        return await ask_self(context.engine, context.tokenizer, task, rollout.prompt_ids, sample, term.args, within_s)

    async def _publish(self, trajectory: Trajectory, files: Mapping[str, bytes]) -> None:
        """Publish a sample with the images of its episode; store these again if the broker has lost them."""
        queue, outbox = self._context.queue, self._context.outbox
        for _ in range(IMAGE_TRIES):
            if files:
                await asyncio.to_thread(queue.keep_images, trajectory.task_id, files)
            if await outbox.publish(trajectory) != "images":
                return
        await self._fail([trajectory.sample], "one of its images belongs neither to its prompt nor to its episode")

    async def _prepare(self, sample: SampledCompletion, seconds: float) -> Trajectory | None:
        """Return the sample's message; None, and note it as unfinished, if it is not finished.

        Waits until its weights are decided. DataError if it repeatedly has no new token though no generator ends.
        """
        context = self._context
        good = await context.updates.wait_trusted(sample.spans, len(sample.tokens))
        check_finite(sample, good)
        earlier = self._earlier(sample.index)
        if sample.finish == "abort" or good < len(sample.tokens):
            partial = sample.to_partial(good)
            cut_short = self._ending or context.orders.times_lent != self._times_lent
            grown = partial.size > (earlier.size if earlier is not None else 0)
            if good == len(sample.tokens) and not cut_short and not grown:
                bound = context.config.broker.max_deliveries
                if self._delivery.fruitless >= bound:
                    raise DataError(
                        "its finish is 'abort' without a new token, though the generator is not ending; it was returned"
                        f" {bound} times for that"
                    )
                self._fruitless = True
            self._unfinished.append(self._state(self._trusted(partial)))
            return None
        trajectory = sample.to_trajectory(self._task, context.config.run.name, context.name, seconds)
        trajectory.trace = self._trace(sample.index)
        if earlier is None:
            trajectory.process = context.process
        return trajectory

    def _earlier(self, sample: int) -> Partial | None:
        """Return the saved state of a sample when this rollout began."""
        return next((saved for saved in self._task.partials if saved.sample == sample), None)

    def _save(self, partial: Partial) -> Awaitable[bool]:
        trusted = self._trusted(partial)
        saving = self._save_soon(trusted)
        return saving if trusted.size == partial.size else _WhenAwaited(lambda: self._save_when_checked(partial))

    def _save_soon(self, partial: Partial) -> Awaitable[bool]:
        if partial.size or partial.notes:
            return self._context.saver.save_soon(self._delivery, self._state(partial))
        return SaveDone()

    def _state(self, partial: Partial) -> Partial:
        """Return a partial sample with what it had before this rollout, and with its trace."""
        state = with_earlier(partial, self._earlier(partial.sample))
        return msgspec.structs.replace(state, trace=self._trace(partial.sample, partial.size))

    def _trace(self, sample: int, tokens: int | None = None) -> bytes:
        """Return the trace of a sample's attempts up to now. tokens: sampled so far; None for a finished sample."""
        if self._moments is None:
            return b""
        earlier, own = self._earlier(sample), self._moments.get(sample, ())
        if not own and not (earlier is not None and earlier.trace) and tokens is None:
            return self._uncalled
        end = self._claimed if tokens is None and not own else time.time_ns()
        seconds = (end - self._claimed) / 1e9
        attempt = Noted("attempt", self._context.name, end, seconds, 0 if own else tokens or 0)
        return self._trace_before(sample) + pack_noted([attempt, *own])

    @functools.cached_property
    def _uncalled(self) -> bytes:
        """The trace of a finished sample that has no calls of its own: the same for all of them."""
        return self._trace_before(-1) + pack_noted([Noted("attempt", self._context.name, self._claimed, 0.0)])

    def _trace_before(self, sample: int) -> bytes:
        """Return a sample's trace up to this rollout, -1 for one that none before it has left.

        An attempt whose generator died and had saved nothing of the sample stands without a name.
        """
        earlier, delivery = self._earlier(sample), self._delivery
        since, lost = 10**6 * int(delivery.entry_id.partition(b"-")[0]), delivery.deaths
        before = earlier.trace if earlier is not None else b""
        if not before:
            before = pack_noted([Noted("admitted", "", since, 0.0)])
        elif lost:
            carried = next((saved.trace for saved in delivery.message.partials if saved.sample == sample), b"")
            attempts = [one for one in unpack(before) if one.kind == "attempt"]
            lost -= len(attempts) - sum(one.kind == "attempt" for one in unpack(carried))
            since = max([since, *(1000 * one.end for one in attempts)])
        nameless = Noted("attempt", "", self._claimed, max(self._claimed - since, 1000) / 1e9, failed=True)
        return before + pack_noted([nameless] * lost)

    async def _save_when_checked(self, partial: Partial) -> bool:
        """Save a partial sample once the versions of all its tokens are decided."""
        updates = self._context.updates
        await updates.wait_trusted(partial.spans, len(partial.tokens))
        for call in partial.calls:
            await updates.wait_trusted(call.spans, len(call.tokens))
        return await self._save_soon(self._trusted(partial))

    def _trusted(self, partial: Partial) -> Partial:
        """Return a sample and its calls, each cut to its first tokens of checked versions."""
        trusted = self._context.updates.weights.trusted_length
        calls = [head(call, trusted(call.spans, len(call.tokens))) for call in partial.calls]
        kept = [call for call, whole in zip(calls, partial.calls, strict=True) if call is whole or len(call.tokens)]
        return msgspec.structs.replace(head(partial, trusted(partial.spans, len(partial.tokens))), calls=kept)

    async def _fail(
        self, samples: Sequence[int], reason: str, broken_version: int = -1, kind: str = "workflow"
    ) -> None:
        """Make each of the samples a dead letter; their group continues without them."""
        if not samples:
            return
        log.warning("samples failed", task_id=self._task.task_id, samples=len(samples), reason=reason)
        for sample in samples:
            await asyncio.to_thread(
                self._context.queue.fail_sample,
                self._task.task_id,
                sample,
                reason=reason,
                broken_version=broken_version,
                kind=kind,
                trace=self._trace(sample, 0),
                delivery=self._delivery,
            )


@dataclass(frozen=True)
class _WhenAwaited:
    """An awaitable that makes its coroutine only when it is awaited."""

    make: Callable[[], Coroutine[Any, Any, bool]]

    def __await__(self) -> Generator[Any, None, bool]:
        return self.make().__await__()


class NotFinite(DataError):
    """A sample has a NaN or infinite log-probability. version: the weights that gave it."""

    def __init__(self, version: int) -> None:
        super().__init__(
            f"its log-probabilities are not finite (NaN or infinity), of weights version {version};"
            " the weights or the machine may be broken"
        )
        self.version = version


def check_finite(sample: SampledCompletion, length: int) -> None:
    """Raise NotFinite if one of the first ``length`` log-probabilities is not finite."""
    if math.isfinite(sum(sample.logprobs)):  # the common case; a sum may also overflow
        return
    finite = np.isfinite(np.asarray(sample.logprobs[:length], dtype=np.float32))
    if not finite.all():
        at = int(np.argmin(finite))
        raise NotFinite(next((span.version for span in reversed(sample.spans) if span.start <= at), -1))


def longest(partials: Sequence[Partial]) -> list[Partial]:
    """Return the longest partial of each sample, the first of equals, with the notes of all."""
    by_sample: dict[int, Partial] = {}
    for partial in partials:
        other = by_sample.get(partial.sample, partial)
        longer, shorter = (partial, other) if partial.size > other.size else (other, partial)
        by_sample[partial.sample] = msgspec.structs.replace(longer, notes={**shorter.notes, **longer.notes})
    return list(by_sample.values())


def head(part: P, length: int) -> P:
    """Return the first ``length`` tokens of a partial sample or call; a call that is cut counts as unfinished."""
    if length == len(part.tokens):
        return part
    cut = msgspec.structs.replace(
        part,
        tokens=Array.of(part.tokens.numpy()[:length], "i4"),
        logprobs=Array.of(part.logprobs.numpy()[:length], "f4"),
        spans=[Span(s.version, s.start, min(s.end, length)) for s in part.spans if s.start < length],
    )
    return msgspec.structs.replace(cut, finish="abort") if isinstance(cut, Call) else cut
