"""The workflow ``fragments``: a task becomes T steps of N environments, in an evaluation one whole episode."""

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from producers.embodied.environment_process import EnvironmentLost, spec_of
from producers.embodied.episode_groups import play_episodes, play_group
from producers.embodied.fragment_collector import Collected, Episodes, FragmentCollector, PolicyFunction, spans_of
from producers.embodied.mlp_engine import MlpEngine
from producers.workflows.base import RolloutContext, WorkflowServices
from producers.workflows.trajectory_builder import SampledCompletion
from schemas.errors import ConfigError, DataError
from schemas.messages import Span, Task
from schemas.messages.fragments import Fragment
from schemas.policy_shape import PolicyShape


class Fragments:
    """Plays environments with the engine mlp, one fragment at a time, in a thread beside the event loop."""

    def __init__(self) -> None:
        self._idle: dict[bytes, list[FragmentCollector]] = {}
        """Idle environments by kind and size. Those of evaluations may play at the same time, any others take turns."""
        self._turn = threading.Lock()
        self._squashed = self._whole = False
        self._discount: float | None = None
        self._base = Path()

    async def start(self, services: WorkflowServices) -> None:
        """Check that the policy has the sizes of every environment; ConfigError otherwise."""
        config = services.config
        shape = PolicyShape.read(config.model.path)
        self._squashed, self._whole = shape.squashed, config.compares_episodes
        self._discount, self._base = config.reward_discount, config.base
        for dataset in [*config.train, *(config.eval.dataset if config.eval else [])]:
            spec = spec_of(dataset.args, self._base)
            if max(spec.step_s, spec.reset_s) >= config.generator.stall_s:
                raise ConfigError(
                    f"environment {spec.id}: step_s {spec.step_s:g} and reset_s {spec.reset_s:g} must be below"
                    f" generator.stall_s {config.generator.stall_s:g}, after which the generator itself is restarted"
                )
            needed = await asyncio.to_thread(spec.shape)
            parts = [(one.observations, one.actions, one.continuous) for one in (needed, shape)]
            if parts[0] != parts[1]:
                raise ConfigError(
                    f"model.path {config.model.path}: a policy for {spec.id} needs observations"
                    f" {needed.observations}, actions {needed.actions}, continuous {str(needed.continuous).lower()}"
                )
            if shape.squashed and not needed.squashed:
                raise ConfigError(f"environment {spec.id}: a squashed policy needs actions with finite bounds")

    async def close(self) -> None:
        """Close all environments, after the fragment under way."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with self._turn:
            for collector in chain(*self._idle.values()):
                collector.close()

    async def run(self, rollout: RolloutContext) -> AsyncIterator[SampledCompletion]:
        """Yield one sample for each index; one that was aborted has no step, and is played again elsewhere."""
        engine = rollout.engine
        if not isinstance(engine, MlpEngine):
            raise ConfigError("generator.workflow.name fragments needs generator.engine mlp")
        if self._whole and rollout.task.kind == "train":
            for sample in await asyncio.to_thread(self._play_group, engine, rollout.task, rollout.indices):
                yield sample
            return
        play = self._play_episode if rollout.task.kind == "eval" else self._play_fragment
        for index in rollout.indices:
            yield await asyncio.to_thread(play, engine, rollout.task, index)

    def _play_fragment(self, engine: MlpEngine, task: Task, index: int) -> SampledCompletion:
        data = task.data
        sizes = data["envs"], data["seed"], data["processes"], self._discount
        with self._turn, self._playing(engine, task, *sizes) as (collector, actor):
            return _sample(task, index, collector.collect(data["steps"], actor))

    def _play_group(self, engine: MlpEngine, task: Task, indices: Sequence[int]) -> list[SampledCompletion]:
        """Play an episode for each sample of the task, all from the state of its seed."""
        seed, processes = task.data["seed"], min(task.data["processes"], task.n)
        with self._turn, self._playing(engine, task, task.n, seed, processes) as (collector, actor):
            found = play_group(collector, seed, task.data["steps"], actor)
        return [_sample(task, index, None if found is None else found[index]) for index in indices]

    def _play_episode(self, engine: MlpEngine, task: Task, index: int) -> SampledCompletion:
        """Play one episode from the task's seed to its end; at temperature 0 with the most probable actions."""
        seed = task.data["seed"] + index
        with self._playing(engine, task, 1, seed) as (collector, actor):
            parts = play_episodes(collector, seed, 1, actor)
        if parts is None:
            return _sample(task, index, None)
        spans = list(spans_of(np.array([part.spans[0].version for part in parts])))
        return _sample(task, index, None, spans, parts[-1].episodes)

    @contextmanager
    def _playing(
        self, engine: MlpEngine, task: Task, envs: int, seed: int, processes: int = 1, discount: float | None = None
    ) -> Iterator[tuple[FragmentCollector, PolicyFunction]]:
        """Yield the task's environments, idle or new ones, and the policy that plays them in the block.

        An error in the block closes them, whatever state they are in, so the next task begins with fresh ones.
        """
        spec = spec_of(task.data, self._base)
        idle = self._idle.setdefault(msgspec.msgpack.encode([task.kind, spec, envs, processes]), [])
        try:
            collector = idle.pop()
        except IndexError:
            collector = FragmentCollector(spec, envs, seed, processes, self._squashed, discount)
        greedy = task.kind == "eval" and task.sampling.temperature == 0
        try:
            with engine.playing() as begun:
                yield collector, functools.partial(engine.act, begun=begun, greedy=greedy)
        except Exception as error:
            collector.close()
            if isinstance(error, EnvironmentLost):
                raise DataError(f"environment {spec.id}: {error}") from error
            raise
        idle.append(collector)


def _sample(
    task: Task, index: int, found: Collected | None, spans: list[Span] | None = None, episodes: Episodes | None = None
) -> SampledCompletion:
    """Return what was played as a sample with a token for each step; without steps it was aborted."""
    if found is not None:
        spans, episodes = found.spans, found.episodes
    fragment: Fragment | None = found.fragment if found is not None else None
    steps = spans[-1].end if spans else 0
    metrics: dict[str, Any] = episodes.metrics() if episodes is not None else {}
    earned = float(np.sum(fragment.rewards.numpy()) / fragment.envs) if fragment is not None else metrics.get("return")
    return SampledCompletion(
        index=index,
        tokens=[0] * steps,
        loss_mask=[1] * steps,
        logprobs=[0.0] * steps,
        spans=spans or [],
        turns=[],
        finish="stop" if steps else "abort",
        prompt=task.text or "",
        completion=", ".join(f"{name} {value:g}" for name, value in metrics.items()),
        reward=earned,
        metrics=metrics,
        fragment=fragment,
    )
