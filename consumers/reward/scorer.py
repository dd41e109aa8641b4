"""Scores of trajectories: the sum of the reward's terms by weight, each called in this process or in a worker.

A sample whose function raises, hangs, crashes or returns no finite number gets a Score that says so, never a reward of
0, and neither delays nor fails another sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path

import numpy as np

from consumers.reward.rewards.terms import RewardInput, TermResult, resolve
from consumers.reward.workers.pool import WorkerPool
from schemas.config import RewardTerm
from schemas.errors import InfraError
from schemas.messages import Score, Trajectory


class Scorer:
    """Scores trajectories by a list of terms. Thread-safe; several threads may score at once::

        scorer = Scorer(config.reward.terms, config.base, workers=2, timeout_s=15.0)
        scores = scorer.score(trajectories)
        scorer.close()

    ConfigError if a term is wrong. ``name`` is written into every score.
    """

    def __init__(self, terms: list[RewardTerm], base: Path, workers: int, timeout_s: float, name: str = "") -> None:
        self._terms = resolve(terms, base)
        self._name = name
        self._inline = [i for i, term in enumerate(self._terms) if term.inline]
        self._pooled = [i for i, term in enumerate(self._terms) if not term.inline]
        self._pool = WorkerPool(terms, base, workers, timeout_s) if self._pooled else None

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Score trajectories and return when all are done, in their order. InfraError if the workers cannot run."""
        waiting = [self._begin(trajectory) for trajectory in trajectories]
        return [item if isinstance(item, Score) else self._finish(*item) for item in waiting]

    def submit(self, trajectory: Trajectory) -> Future[Score]:
        """Score a trajectory without waiting, so that a slow sample holds up no other."""
        scored: Future[Score] = Future()
        begun = self._begin(trajectory)
        if isinstance(begun, Score):
            scored.set_result(begun)
            return scored
        outcomes, future = begun

        def deliver(done: Future[list[TermResult]]) -> None:
            try:
                scored.set_result(self._sum({**outcomes, **dict(zip(self._pooled, done.result(), strict=False))}))
            except (InfraError, CancelledError) as error:
                scored.set_exception(error)

        future.add_done_callback(deliver)
        return scored

    def close(self) -> None:
        """End the workers; a second call does nothing."""
        if self._pool is not None:
            self._pool.close()

    def _begin(self, trajectory: Trajectory) -> Score | tuple[dict[int, TermResult], Future[list[TermResult]]]:
        """Call the inline terms, and give the others to the workers unless an inline one failed."""
        sample = reward_input(trajectory)
        outcomes = {}
        for i in self._inline:
            outcomes[i] = self._terms[i].call(sample)
            if outcomes[i].status != "ok":
                return self._sum(outcomes)
        if self._pool is None:
            return self._sum(outcomes)
        return outcomes, self._pool.submit(self._pooled, sample)

    def _finish(self, outcomes: dict[int, TermResult], future: Future[list[TermResult]]) -> Score:
        limit = self._pool.longest_wait_s() if self._pool is not None else 0.0
        try:
            return self._sum({**outcomes, **dict(zip(self._pooled, future.result(limit), strict=False))})
        except TimeoutError:
            raise InfraError(f"no reward worker answered within {limit:.0f} s") from None

    def _sum(self, outcomes: dict[int, TermResult]) -> Score:
        seconds = 0.0
        total = 0.0
        components = {}
        for i, outcome in sorted(outcomes.items()):
            term = self._terms[i]
            seconds += outcome.seconds
            if outcome.status != "ok":
                return Score(
                    status=outcome.status,
                    reason=f"{term.label}: {outcome.reason}",
                    scorer=self._name,
                    seconds=seconds,
                )
            components[term.label] = outcome.value
            total += term.weight * outcome.value
        if not math.isfinite(total):
            return Score(status="error", reason=f"the sum is {total}, not finite", scorer=self._name, seconds=seconds)
        return Score(reward=total, components=components, scorer=self._name, seconds=seconds)


def reward_input(trajectory: Trajectory) -> RewardInput:
    """The input of reward functions. The prompt ends at the first token that the policy generated."""
    mask = trajectory.loss_mask.numpy()
    start = int(np.argmax(mask)) if mask.any() else len(mask)
    tokens = trajectory.tokens.numpy().tolist()
    return RewardInput(trajectory.prompt, trajectory.completion, tokens[:start], tokens[start:], trajectory.data)


def check_reward(
    terms: list[RewardTerm], base: Path, trajectory: Trajectory | None = None, timeout_s: float = 15.0
) -> Score | None:
    """Import and check every term, without starting anything; with a trajectory, score it as well.

    ConfigError, in one line, if a term is wrong. The score's ``seconds`` leave out the start of the worker.
    """
    resolve(terms, base)
    if trajectory is None:
        return None
    scorer = Scorer(terms, base, workers=1, timeout_s=timeout_s)
    try:
        return scorer.score([trajectory])[0]
    finally:
        scorer.close()
