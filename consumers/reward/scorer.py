"""Scores of trajectories: the sum of the reward's terms by weight, each called in this process or in a worker.

If a function raises, hangs, crashes or returns something that can't be a reward, the sample's Score says so. The sample
never gets a reward of 0 for that, and neither delays nor fails another sample.
"""

import asyncio
import contextlib
import functools
import hashlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from consumers.reward.rewards.signatures import RewardInput
from consumers.reward.rewards.terms import TermResult, resolve
from consumers.reward.workers.pool import LOAD_TIMEOUT_S, START_TIMEOUT_S, WorkerPool
from consumers.reward.workers.worker import WorkerSetup
from schemas.codec import Array
from schemas.config import RewardConfig, RewardTerm
from schemas.errors import ConfigError
from schemas.messages import REWARD_RANGE, Score, Segment, Trajectory, is_reward
from schemas.messages.moments import ending, pack, unpack

Floats: TypeAlias = npt.NDArray[Any]


class Scorer:
    """Scores trajectories by a list of terms::

        async with Scorer(config.reward, config.base) as scorer:
            scores = await scorer.score_all(trajectories)

    ConfigError if a term is wrong. ``capacity`` is how many samples the workers score at once, 0 if no term needs any.
    """

    def __init__(self, reward: RewardConfig, base: Path, traced: bool = False) -> None:
        """traced: note when each term was computed. The sum decides if a sample has no ``correct_term``."""
        self._traced = traced
        self._terms = resolve(reward.terms, base)
        self._correct_from, self._correct_term = reward.correct_from, reward.correct_term
        for term in self._terms:
            if missing := [name for name in term.secrets if not os.environ.get(name)]:
                raise ConfigError(
                    f"reward {term.label!r}: the environment variable {missing[0]} that it names is not set"
                )
        # Terms in this process first, then those that share workers, then those with a worker of their own.
        numbered = sorted(enumerate(self._terms), key=lambda item: (not item[1].inline, item[1].capacity > 0))
        self._order = [i for i, _ in numbered]
        self._pools: dict[int, WorkerPool] = {}
        shared = [i for i, term in numbered if not (term.inline or term.capacity)]
        own = [[i] for i, term in numbered if not term.inline and term.capacity]
        for serves in [shared, *own] if shared else own:
            served = [self._terms[i] for i in serves]
            shown, count, capacity = reward.env, reward.workers, 1
            if served[0].capacity:
                shown, count, capacity = [*reward.env, *served[0].secrets], 1, served[0].capacity
            setup = WorkerSetup.of(reward.terms, base, serves, reward.timeout_s)
            start_s = LOAD_TIMEOUT_S if any(term.traits.prepare for term in served) else START_TIMEOUT_S
            pool = WorkerPool(setup, count, capacity, start_s, shown)
            self._pools.update(dict.fromkeys(serves, pool))
        self.capacity = sum(pool.capacity for pool in set(self._pools.values()))
        self._running = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Start the workers, and wait for none of them."""
        for pool in set(self._pools.values()):
            await self._running.enter_async_context(pool)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Kill the workers; what is being scored raises InfraError."""
        await self._running.aclose()

    async def score_all(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Score trajectories side by side and return the scores in their order. InfraError if the workers can't run."""
        return await asyncio.gather(*map(self.score, trajectories))

    async def score(self, trajectory: Trajectory) -> Score:
        """Call the trajectory's terms in their order, until one fails. InfraError if the workers can't run."""
        results: dict[int, TermResult] = {}
        # Made when a worker takes the sample: what waits is no larger than its message.
        sample = functools.cache(lambda: reward_input(trajectory))
        begun = False
        trace = b""
        for i in self._order:
            term = self._terms[i]
            if term.datasets is not None and trajectory.dataset not in term.datasets:
                continue
            if (term.traits.trains_only or term.traits.teacher) and trajectory.kind == "eval":
                continue
            if term.inline:
                result = await term.call_async(sample())
            else:
                result = await self._pools[i].call(i, sample, begun)
                begun = True
            results[i] = result
            failed = result.status != "ok"
            if self._traced:
                trace += ending("term", term.label, result.seconds, failed)
            if failed:
                break
        score = self._sum(results, trajectory)
        if trace and score.status != "ok":
            # The trainer gets no more of this sample than its score.
            trace = pack(*unpack(trajectory.trace, trajectory.seconds, trajectory.sampled_tokens)) + trace
        score.trace = trace
        return score

    def cancel_waiting(self) -> None:
        """Cancel the scoring of samples that no worker has begun."""
        for pool in self._pools.values():
            pool.cancel_waiting()

    def _sum(self, outcomes: dict[int, TermResult], trajectory: Trajectory) -> Score:
        seconds = 0.0
        components, parts = dict[str, float](), dict[int, float]()
        taught = list[tuple[float, Floats]]()

        def made(**fields: Any) -> Score:
            return Score(seconds=seconds, dataset=trajectory.dataset, level=trajectory.level, **fields)

        for i, outcome in sorted(outcomes.items()):
            term = self._terms[i]
            seconds += outcome.seconds
            if outcome.status != "ok":
                return made(status=outcome.status, reason=f"{term.label}: {outcome.reason}")
            components |= {f"{term.label}/{name}": value for name, value in outcome.logged.items()}
            if outcome.logprobs is not None:
                taught.append((term.weight, outcome.logprobs.numpy()))
                components[term.label] = _gap(trajectory, taught[-1][1])
                continue
            if outcome.applies:
                components[term.label] = outcome.value
                parts[i] = term.weight * outcome.value
        if not parts and not taught:
            return made(status="error", reason="no term applies to it")
        total = sum(parts.values())
        if not is_reward(total):
            most = self._terms[max(parts, key=lambda i: abs(parts[i]))]
            part = f"{most.label}: {components[most.label]:g} by its weight {most.weight:g}"
            return made(status="error", reason=f"{part} makes a sum of {total:g}, must be {REWARD_RANGE}")
        decisive = components.get(self._correct_term or "", total)
        return made(
            reward=total,
            components=components,
            # A sum of weights such as 0.7 and 0.3 may be a little less than 1.
            correct=decisive >= self._correct_from - 1e-9,
            teacher_logprobs=_mixed(trajectory, taught) if taught else None,
        )


def _gap(trajectory: Trajectory, logprobs: Floats) -> float:
    """Return the mean over the sampled tokens of the policy's log-probability less a teacher's; 0 without any."""
    sampled = trajectory.loss_mask.numpy() == 1
    return float((trajectory.logprobs.numpy() - logprobs)[sampled].mean()) if sampled.any() else 0.0


def _mixed(trajectory: Trajectory, taught: Sequence[tuple[float, Floats]]) -> Array:
    """Return log(sum w p / sum w) over teachers with weights w, float32 [T], 0 where no token was sampled."""
    total = sum(weight for weight, _ in taught)
    parts = [math.log(weight / total) + logprobs.astype(np.float64) for weight, logprobs in taught]
    return Array.of(np.where(trajectory.loss_mask.numpy() == 1, np.logaddexp.reduce(parts), 0.0), "f4")


def reward_input(trajectory: Trajectory) -> RewardInput:
    """Return the input of reward functions. The prompt ends at the first token that the policy generated.

    Of a sample of several segments the ids are the new ones of all, one segment after the other.
    """
    mask = trajectory.loss_mask.data
    start = mask.index(1) if 1 in mask else len(mask)
    tokens = trajectory.tokens.numpy().tolist()
    # A task that is generated again has other tokens, so its sample gets another name.
    digest = hashlib.blake2b(trajectory.tokens.data, digest_size=8).hexdigest()
    return RewardInput(
        trajectory.prompt,
        trajectory.completion,
        tokens[:start],
        tokens[start:],
        trajectory.data,
        trajectory.reward,
        trajectory.metrics,
        trajectory.turns,
        trajectory.calls,
        trajectory.finish,
        _last_row(trajectory) if len(trajectory.segments) > 1 else None,
        f"{trajectory.run}-{trajectory.task_id}-{trajectory.sample}-{digest}",
        max((span.version for span in trajectory.spans), default=0),
        trajectory.segments if len(trajectory.segments) > 1 else [],
        trajectory.temperature,
        trajectory.teacher_logprobs,
        trajectory.teacher_problem,
    )


def _last_row(trajectory: Trajectory) -> list[int]:
    """Return the tokens of the row with the main agent's last answer, or another agent's if it has none."""

    def last_call(numbered: tuple[int, Segment]) -> tuple[int, int]:
        number, segment = numbered
        calls = [turn.call for turn in trajectory.turns if segment.start <= turn.start < segment.end]
        return max(calls, default=-1), number

    segments = list(enumerate(trajectory.segments))
    own = [(k, segment) for k, segment in segments if segment.name == "main"] or segments
    newest, _ = max(own, key=last_call)
    ids: list[int] = trajectory.tokens.numpy()[trajectory.rows()[newest].places].tolist()
    return ids


def check_reward(
    terms: list[RewardTerm],
    base: Path,
    trajectory: Trajectory | None = None,
    timeout_s: float = 15.0,
    env: Sequence[str] = (),
    within_s: float | None = None,
) -> Score | None:
    """Import and check every term; if there is a trajectory, start a worker and return its score.

    ConfigError, in one line, if a term is wrong. The score's ``seconds`` leave out the start of the worker. within_s:
    the score is None if it takes longer than this, with the start.
    """
    resolve(terms, base)
    if trajectory is None:
        return None

    async def score() -> Score | None:
        reward = RewardConfig(terms=terms, workers=1, timeout_s=timeout_s, env=list(env))
        async with Scorer(reward, base) as scorer:
            try:
                async with asyncio.timeout(within_s):
                    return await scorer.score(trajectory)
            except TimeoutError:
                return None

    return asyncio.run(score())
