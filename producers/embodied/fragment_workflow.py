"""The workflow ``fragments``: a task becomes T steps of N environments, in an evaluation one whole episode."""

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any

import msgspec
import numpy as np

from producers.embodied.environment_process import EnvironmentLost, EnvironmentSpec, spec_of
from producers.embodied.episode_groups import play_episodes, play_group
from producers.embodied.fragment_collector import Actor, Collected, Episodes, FragmentCollector
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
        self._collectors: dict[bytes, FragmentCollector] = {}
        self._idle: dict[bytes, list[FragmentCollector]] = {}
        """Of evaluations, which play beside each other."""
        self._turn = threading.Lock()
        self._squashed = self._whole = False
        self._discount: float | None = None

    async def start(self, services: WorkflowServices) -> None:
        """Check that the policy has the sizes of every environment; ConfigError otherwise."""
        config = services.config
        shape = PolicyShape.read(config.model.path)
        self._squashed, self._whole = shape.squashed, config.compares_episodes
        self._discount = config.reward_discount
        for dataset in [*config.train, *(config.eval.dataset if config.eval else [])]:
            spec = spec_of(dataset.args)
            if max(spec.step_s, spec.reset_s) >= config.generator.stall_s:
                raise ConfigError(
                    f"environment {spec.id}: step_s {spec.step_s:g} and reset_s {spec.reset_s:g} must be below"
                    f" generator.stall_s {config.generator.stall_s:g}, after which the generator itself is restarted"
                )
            needed = await asyncio.to_thread(spec.shape)
            if (needed.observations, needed.actions, needed.continuous) != (
                shape.observations,
                shape.actions,
                shape.continuous,
            ):
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
            for collector in [*self._collectors.values(), *chain(*self._idle.values())]:
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
        spec = spec_of(data)
        key = msgspec.msgpack.encode([spec, data["envs"], data["processes"]])
        with self._turn:
            collector = self._collectors.get(key)
            if collector is None:
                collector = self._collectors[key] = FragmentCollector(
                    spec, data["envs"], data["seed"], data["processes"], self._squashed, self._discount
                )
            try:
                with engine.playing() as begun:
                    found = collector.collect(data["steps"], functools.partial(engine.act, begun=begun))
            except Exception:
                # Whatever state the environments are in, the next fragment begins with fresh ones.
                self._collectors.pop(key).close()
                raise
        return _sample(task, index, found)

    def _play_group(self, engine: MlpEngine, task: Task, indices: Sequence[int]) -> list[SampledCompletion]:
        """Play an episode for each sample of the task, all from the state of its seed."""
        spec, data = spec_of(task.data), task.data
        processes = min(data["processes"], task.n)
        key = msgspec.msgpack.encode([spec, task.n, processes])
        with self._turn:
            collector = self._collectors.pop(key, None)
            if collector is None:
                collector = FragmentCollector(spec, task.n, data["seed"], processes, self._squashed)
            with _actor(engine, spec, collector) as actor:
                found = play_group(collector, data["seed"], data["steps"], actor)
            self._collectors[key] = collector
        return [_sample(task, index, None if found is None else found[index]) for index in indices]

    def _play_episode(self, engine: MlpEngine, task: Task, index: int) -> SampledCompletion:
        """Play one episode from the task's seed to its end; at temperature 0 with the most probable actions."""
        spec, seed = spec_of(task.data), task.data["seed"] + index
        idle = self._idle.setdefault(msgspec.msgpack.encode(spec), [])
        try:
            collector = idle.pop()
        except IndexError:
            collector = FragmentCollector(spec, 1, seed, squashed=self._squashed)
        with _actor(engine, spec, collector, greedy=task.sampling.temperature == 0) as actor:
            parts = play_episodes(collector, seed, 1, actor)
        idle.append(collector)
        if parts is None:
            return _sample(task, index, None)
        versions = [part.spans[0].version for part in parts]
        starts = [t for t, version in enumerate(versions) if not t or version != versions[t - 1]]
        spans = [Span(versions[start], start, end) for start, end in pairwise([*starts, len(parts)])]
        return _sample(task, index, None, spans, parts[-1].episodes)


@contextmanager
def _actor(
    engine: MlpEngine, spec: EnvironmentSpec, collector: FragmentCollector, greedy: bool = False
) -> Iterator[Actor]:
    """Yield the policy to play with in the block; an error there closes the collector."""
    try:
        with engine.playing() as begun:
            yield functools.partial(engine.act, begun=begun, greedy=greedy)
    except Exception as error:
        collector.close()
        if isinstance(error, EnvironmentLost):
            raise DataError(f"environment {spec.id}: {error}") from error
        raise


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
