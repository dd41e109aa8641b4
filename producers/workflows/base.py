"""The workflow protocol: how a task becomes samples. A user's agent or environment is one class like this."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from producers.engines.base import Completion, Engine
from producers.rendering.tokenizer import Tokenizer
from producers.workflows import WORKFLOWS
from producers.workflows.trajectory_builder import SampledCompletion, TrajectoryBuilder
from schemas.errors import ConfigError
from schemas.messages import Partial, Sampling, Task
from schemas.plugins import check_arguments, check_method


def _keep_nothing(partial: Partial) -> None:
    """Nobody could go on with it."""


@dataclass(frozen=True)
class RolloutContext:
    """Everything that a workflow has to turn one task into samples.

    indices: the samples that are asked for, of ``range(task.n)``. save: keeps what a growing sample has so far,
    for whoever has to go on with it if this process dies; it is found again in ``saved``.
    """

    engine: Engine
    tokenizer: Tokenizer
    task: Task
    indices: Sequence[int]
    save: Callable[[Partial], None] = _keep_nothing

    @property
    def sampling(self) -> Sampling:
        """How to sample, seed, length and stop strings included."""
        return self.task.sampling

    @cached_property
    def prompt_ids(self) -> list[int]:
        """Token ids of the task's prompt. DataError if it has none."""
        return self.tokenizer.prompt_ids(self.task)

    @cached_property
    def saved(self) -> dict[int, Partial]:
        """What there is already of samples that another generator began, by index."""
        return {partial.sample: partial for partial in self.task.partials if partial.size}

    async def generate(self, trajectory: TrajectoryBuilder) -> Completion:
        """Sample the policy's next turn after all tokens of ``trajectory``, and add it there."""
        (completion,) = await self.engine.generate(list(trajectory.tokens), self.sampling)
        trajectory.generated(completion)
        return completion

    async def each(
        self, sample: Callable[[RolloutContext, TrajectoryBuilder], Awaitable[SampledCompletion]]
    ) -> AsyncIterator[SampledCompletion]:
        """Run ``sample`` for every index at once, each with an empty builder, and yield results as they come."""
        running = [
            asyncio.ensure_future(_stay(sample(self, TrajectoryBuilder(index, self.tokenizer))))
            for index in self.indices
        ]
        try:
            for finished in asyncio.as_completed(running):
                yield await finished
        finally:
            for task in running:
                task.cancel()


async def _stay(sample: Awaitable[SampledCompletion]) -> SampledCompletion:
    """Await a sample; an event loop would let sys.exit in one of its tasks end the whole process."""
    try:
        return await sample
    except SystemExit as error:
        raise RuntimeError(f"it called sys.exit({error.code!r})") from error


class Workflow(Protocol):
    """Turns a task into samples. Built once per generator with the arguments of ``generator.workflow.args``.

    ``run`` is an async generator, or returns ``rollout.each(self.sample)`` for samples that are made one by one.
    """

    def run(self, rollout: RolloutContext) -> AsyncIterator[SampledCompletion]:
        """Yield one SampledCompletion for each of ``rollout.indices``, in any order, each as soon as it is finished.

        Whatever it raises fails this task alone: samples that are missing become dead letters with the reason. Only
        InfraError and ConfigError end the generator, because the task may succeed elsewhere, or never.
        """
        ...


def find_workflow(name: str, args: dict[str, Any], base: Path) -> Callable[[], Workflow]:
    """The named workflow, built by calling what is returned; ConfigError if it can't be one, before any model loads.

    args: its arguments of the configuration. base: the folder that names of a user's files start from.
    """
    found = WORKFLOWS.get(name, base)
    check_method("generator.workflow", found, "run", ("rollout",))
    if inspect.iscoroutinefunction(found.run):
        raise ConfigError(f"generator.workflow {name}: run must yield or return an async iterator, not be a coroutine")
    check_arguments("generator.workflow", found, args)
    return functools.partial(found, **args)
