"""The workflow protocol: how a task becomes samples. A user's agent or environment is one class like this."""

import asyncio
import functools
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec
import structlog

from producers.engines.base import Completion, Engine, PromptImage
from producers.images.placeholders import ImagePlaceholders
from producers.tokenizer import HfTokenizer
from producers.workflows import WORKFLOWS
from producers.workflows.trajectory_builder import SampledCompletion, TrajectoryBuilder
from schemas.config import TidemillConfig
from schemas.errors import ConfigError, DataError, InfraError, describe_error
from schemas.messages import LiveEpisode, Partial, PlacedImage, Sampling, Task
from schemas.messages.moments import MomentKind, Noted
from schemas.plugins import check_method, fit_arguments
from schemas.system.lifecycle import leaving_aside

log = structlog.get_logger()


class SaveDone:
    """The result for a sample that is saved at once, or that can't be resumed."""

    def __await__(self) -> Generator[Any, None, bool]:
        yield from ()
        return True


@dataclass(frozen=True)
class FailedSample:
    """A sample that failed, while others continue. reason: one line. kind: a word to count it by."""

    index: int
    reason: str
    kind: str = "workflow"


@dataclass(frozen=True)
class RolloutContext:
    """Everything that a workflow has to turn one task into samples.

    indices: the samples that are asked for, of ``range(task.n)``. save: keeps what a growing sample has so far,
    for the generator that resumes it if this process dies; it is found again in ``saved``. It is kept soon; await what
    ``save`` returns if it must be stored before you continue: False says that it can't be, because the task is another
    generator's by now, or the broker is away. report: adds an event to the timeline, by a word and a
    sentence. interrupted: set when the process ends soon, and what is unfinished has to be yielded with finish
    ``abort``; requests in the engine are aborted by themselves. placeholders, files: how images stand in prompts, and
    the files of the task's images by digest; None and nothing with a model of text. moments: by sample; None without
    traces.
    """

    engine: Engine
    tokenizer: HfTokenizer
    task: Task
    indices: Sequence[int]
    save: Callable[[Partial], Awaitable[bool]] = lambda partial: SaveDone()
    report: Callable[[str, str], None] = lambda name, text: None
    interrupted: asyncio.Event = field(default_factory=asyncio.Event)
    placeholders: ImagePlaceholders | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    moments: dict[int, list[Noted]] | None = None

    def note(self, sample: int, kind: MomentKind, name: str, began: float, tokens: int = 0) -> None:
        """Note a part of a sample that ends now, for its trace. began: on the clock ``time.monotonic``."""
        if self.moments is not None:
            seconds = time.monotonic() - began
            self.moments.setdefault(sample, []).append(Noted(kind, name, time.time_ns(), seconds, tokens))

    @property
    def sampling(self) -> Sampling:
        """Return the sampling settings, with seed, length and stop strings."""
        return self.task.sampling

    def sampling_of(self, index: int) -> Sampling:
        """Return the sampling settings of one sample, with a seed of its own if the task has one."""
        sampling = self.task.sampling
        return sampling if sampling.seed is None else msgspec.structs.replace(sampling, seed=sampling.seed + index)

    @property
    def prompt_ids(self) -> list[int]:
        """Return the token ids of the task's prompt, with the tokens of its images. DataError if it is empty."""
        return self._prompt[0]

    @property
    def images(self) -> list[PlacedImage]:
        """Images of the prompt, where their tokens are."""
        return self._prompt[1]

    @cached_property
    def _prompt(self) -> tuple[list[int], list[PlacedImage]]:
        ids = self.tokenizer.prompt_ids(self.task)
        if self.placeholders is not None:
            return self.placeholders.expand(ids, self.task.images)
        if self.task.images:
            raise DataError("the prompt has images, and this generator was started with model.kind text")
        return ids, []

    @cached_property
    def engine_images(self) -> dict[str, Any]:
        """Return the prompt's images for the engine, or nothing if there are none."""
        found = [PromptImage(image.digest, image.start, image.end, self.files[image.digest]) for image in self.images]
        return {"images": found} if found else {}

    @cached_property
    def saved(self) -> dict[int, Partial]:
        """Return the saved parts of samples that another generator began, by index."""
        return {partial.sample: partial for partial in self.task.partials if partial.size or partial.notes}

    async def generate(self, trajectory: TrajectoryBuilder) -> Completion:
        """Sample the policy's next turn after all tokens of ``trajectory``, and add it there."""
        sampling = self.sampling_of(trajectory.index)
        (completion,) = await self.engine.generate(list(trajectory.tokens), sampling, **self.engine_images)
        trajectory.generated(completion)
        return completion

    def each(
        self, sample: Callable[[Self, TrajectoryBuilder], Awaitable[SampledCompletion]]
    ) -> AsyncIterator[SampledCompletion | FailedSample]:
        """Run ``sample`` for every index at once, each with an empty builder, and yield results as they come.

        Whatever one of them raises fails this sample alone, except for InfraError and ConfigError.
        """
        return play_each(lambda index: sample(self, TrajectoryBuilder(index, self.tokenizer)), self.indices)


async def play_each(
    play: Callable[[int], Awaitable[SampledCompletion | FailedSample]], indices: Sequence[int]
) -> AsyncIterator[SampledCompletion | FailedSample]:
    """Play these samples at once, and yield each as soon as it has ended; one that raises has failed."""
    running = [asyncio.ensure_future(_fate(play(index), index)) for index in indices]
    try:
        for finished in asyncio.as_completed(running):
            yield await finished
    finally:
        for task in running:
            task.cancel()


async def _fate(sample: Awaitable[SampledCompletion | FailedSample], index: int) -> SampledCompletion | FailedSample:
    """Await a sample; an event loop would let sys.exit in one of its tasks end the whole process."""
    try:
        return await sample
    except SystemExit as error:
        return FailedSample(index, f"RuntimeError: it called sys.exit({error.code!r})")
    except DataError as error:
        return FailedSample(index, str(error))
    except Exception as error:  # user code: whatever it raises is the fate of this one sample
        if is_service_error(error):
            raise
        log.warning("a sample failed", sample=index, exc_info=error)
        return FailedSample(index, describe_error(error))


def is_service_error(error: BaseException) -> bool:
    """Return whether an error, or one in its group, is of the service rather than of the sample."""
    if isinstance(error, ExceptionGroup):
        return error.subgroup((ConfigError, InfraError)) is not None
    return isinstance(error, ConfigError | InfraError)


class LiveConversations(Protocol):
    """Conversations of users, for the workflow ``live``; broker/queues/live_episodes.py says what each method does."""

    def register(self, seat: str, url: str) -> tuple[str, LiveEpisode]: ...
    def release(self, seat: str, url: str) -> None: ...

    def read(self, ids: Sequence[str]) -> tuple[float, dict[str, LiveEpisode]]: ...

    def end(self, id: str) -> float | None: ...


@dataclass(frozen=True)
class WorkflowServices:
    """The argument of a workflow's method ``start``, once the engine runs.

    report: see RolloutContext. clock: seconds, which stand still while generation is paused. live: conversations of
    users, None outside of a run.
    """

    engine: Engine
    tokenizer: HfTokenizer
    config: TidemillConfig
    report: Callable[[str, str], None] = lambda name, text: None
    clock: Callable[[], float] = time.monotonic
    live: LiveConversations | None = None


class Workflow(Protocol):
    """Turns a task into samples. Built once per generator with the arguments of ``generator.workflow.args``.

    ``run`` is an async generator, or returns ``rollout.each(self.sample)`` for samples that are made one by one. There
    may be ``async def start(self, services: WorkflowServices)`` and ``async def close(self)`` for what lives longer,
    and a static ``check(base, **args)`` that raises ConfigError for arguments that can't be, before any model loads.
    """

    def run(self, rollout: RolloutContext) -> AsyncIterator[SampledCompletion | FailedSample]:
        """Yield one SampledCompletion for each of ``rollout.indices``, in any order, each as soon as it is finished.

        A FailedSample says that there won't be one. Whatever it raises fails this task alone: samples that are missing
        become dead letters with the reason. Only InfraError and ConfigError end the generator, because the task may
        succeed elsewhere, or never.
        """


def find_workflow(name: str, args: dict[str, Any], base: Path) -> Callable[[], Workflow]:
    """Return a builder of the named workflow; ConfigError, before any model loads, if it can't be one.

    args: its arguments of the configuration. base: the folder that names of a user's files start from.
    """
    found = WORKFLOWS.get(name, base)
    check_method("generator.workflow", found, "run", ("rollout",))
    if inspect.iscoroutinefunction(found.run):
        raise ConfigError(f"generator.workflow {name}: run must yield or return an async iterator, not be a coroutine")
    fitted = fit_arguments("generator.workflow", found, args)
    if (check := getattr(found, "check", None)) is not None:
        check(base, **args)
    return functools.partial(found, **fitted)


@asynccontextmanager
async def running(workflow: Workflow, services: WorkflowServices) -> AsyncIterator[None]:
    """Start a workflow that has something to start, and close it at the end.

    Meanwhile the garbage collector leaves what there was at the beginning aside: looking through all objects of a model
    library holds the event loop, and every request, for a quarter of a second.
    """
    start, close = getattr(workflow, "start", None), getattr(workflow, "close", None)
    try:
        if start is not None:
            await start(services)
        with leaving_aside():
            yield
    finally:
        if close is not None:
            await close()
