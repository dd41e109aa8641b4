"""Scores of trajectories: the sum of the reward's terms by weight, each called in this process or in a worker.

Terms that share the workers come first, one after the other; then those that have a worker of their own.

A sample whose function raises, hangs, crashes or returns no number that can be a reward gets a Score that says so,
never a reward of 0, and neither delays nor fails another sample.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from consumers.reward.rewards.signatures import RewardInput
from consumers.reward.rewards.terms import Term, TermResult, resolve
from consumers.reward.workers.pool import LOAD_TIMEOUT_S, START_TIMEOUT_S, WorkerPool
from consumers.reward.workers.shared import SharedPool
from schemas.config import RewardTerm
from schemas.errors import ConfigError, InfraError
from schemas.messages import REWARD_RANGE, Score, ScoreStatus, Segment, Trajectory, is_reward


class Scorer:
    """Scores trajectories by a list of terms. Thread-safe; several threads may score at once::

        scorer = Scorer(config.reward.terms, config.base, workers=2, timeout_s=15.0)
        scores = scorer.score(trajectories)
        scorer.close()

    ConfigError if a term is wrong. ``places`` is how many samples the workers do at once, 0 if no term needs any, so
    that ``submit`` returns what is done.
    """

    def __init__(
        self,
        terms: list[RewardTerm],
        base: Path,
        workers: int,
        timeout_s: float,
        env: Sequence[str] = (),
        correct_from: float = 1.0,
        correct_term: str | None = None,
    ) -> None:
        """env: names of further environment variables that reward functions see. correct_from, correct_term: as in
        RewardConfig; the sum decides where a sample has no such term."""
        self._terms = resolve(terms, base)
        self._correct_from, self._correct_term = correct_from, correct_term
        self._inline = [i for i, term in enumerate(self._terms) if term.inline]
        pooled = [i for i, term in enumerate(self._terms) if not term.inline]
        check_secrets(self._terms)
        self.places = 0
        self._stages: list[tuple[list[int], WorkerPool | SharedPool]] = []
        if plain := [i for i in pooled if not self._terms[i].places]:
            start_s = _start_timeout_s([self._terms[i] for i in plain])
            self._stages.append((plain, WorkerPool(terms, base, workers, timeout_s, start_s, env, plain)))
            self.places += workers
        for i in pooled:
            if places := self._terms[i].places:
                shown = [*env, *self._terms[i].secrets]
                start_s = _start_timeout_s([self._terms[i]])
                self._stages.append(([i], SharedPool(terms, base, i, places, timeout_s, start_s, shown)))
                self.places += places

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Score trajectories and return when all are done, in their order. InfraError if the workers cannot run."""
        return [self._result(future) for future in [self.submit(trajectory) for trajectory in trajectories]]

    def submit(self, trajectory: Trajectory) -> Future[Score]:
        """Score a trajectory without waiting, so that a slow sample holds up no other.

        The inline terms are called at once, the others by the workers, unless an inline one failed. The future can be
        cancelled until a worker takes it.
        """
        outcomes: dict[int, TermResult] = {}
        dataset = trajectory.dataset
        inline = self._for_dataset(self._inline, dataset)
        if inline:
            sample = reward_input(trajectory)
            for i in inline:
                outcomes[i] = self._terms[i].call(sample)
                if outcomes[i].status != "ok":
                    return _done(self._sum(outcomes, trajectory))
        stages = [(wanted, pool) for terms, pool in self._stages if (wanted := self._for_dataset(terms, dataset))]
        if not stages:
            return _done(self._sum(outcomes, trajectory))
        return _Staged(stages, lambda: reward_input(trajectory), outcomes, lambda found: self._sum(found, trajectory))

    def _for_dataset(self, terms: list[int], dataset: str) -> list[int]:
        """Those of the terms that samples of this dataset get."""
        return [i for i in terms if (wanted := self._terms[i].datasets) is None or dataset in wanted]

    def close(self) -> None:
        """End the workers; a second call does nothing."""
        for _, pool in self._stages:
            pool.close()

    def _result(self, future: Future[Score]) -> Score:
        limit = sum(pool.longest_wait_s() for _, pool in self._stages)
        try:
            return future.result(limit)
        except TimeoutError:
            raise InfraError(f"no reward worker answered within {limit:.0f} s") from None

    def _sum(self, outcomes: dict[int, TermResult], trajectory: Trajectory) -> Score:
        seconds = 0.0
        components, parts = dict[str, float](), dict[int, float]()

        def failed(status: ScoreStatus, reason: str) -> Score:
            return Score(
                status=status,
                reason=reason,
                seconds=seconds,
                dataset=trajectory.dataset,
                level=trajectory.level,
            )

        for i, outcome in sorted(outcomes.items()):
            term = self._terms[i]
            seconds += outcome.seconds
            if outcome.status != "ok":
                return failed(outcome.status, f"{term.label}: {outcome.reason}")
            if outcome.applies:
                components[term.label] = outcome.value
                parts[i] = term.weight * outcome.value
        if not components:
            return failed("error", "no term applies to it")
        total = sum(parts.values())
        if not is_reward(total):
            most = self._terms[max(parts, key=lambda i: abs(parts[i]))]
            part = f"{most.label}: {components[most.label]:g} by its weight {most.weight:g}"
            return failed("error", f"{part} makes a sum of {total:g}, must be {REWARD_RANGE}")
        decisive = components.get(self._correct_term or "", total)
        return Score(
            reward=total,
            components=components,
            seconds=seconds,
            # A sum of weights such as 0.7 and 0.3 may be a little less than 1.
            correct=decisive >= self._correct_from - 1e-9,
            dataset=trajectory.dataset,
            level=trajectory.level,
        )


class _Staged(Future[Score]):
    """The score of a sample that goes through stages of terms, until one fails.

    It can be cancelled until a worker takes it for the first time.
    """

    def __init__(
        self,
        stages: Sequence[tuple[list[int], WorkerPool | SharedPool]],
        sample: Callable[[], RewardInput],
        outcomes: dict[int, TermResult],
        total: Callable[[dict[int, TermResult]], Score],
    ) -> None:
        super().__init__()
        self._ahead = list(stages)
        self._sample = sample
        self._outcomes = outcomes
        self._total = total
        self._first = self._begin()

    def cancel(self) -> bool:
        return self._first.cancel() and super().cancel()

    def _begin(self) -> Future[list[TermResult]]:
        terms, pool = self._ahead.pop(0)
        future = pool.submit(terms, self._sample, list)
        future.add_done_callback(partial(self._done_with, terms))
        return future

    def _done_with(self, terms: list[int], future: Future[list[TermResult]]) -> None:
        if future.cancelled():
            return
        if (error := future.exception()) is not None:
            self.set_exception(error)
            return
        results = future.result()
        self._outcomes.update(zip(terms, results, strict=False))
        if self._ahead and results[-1].status == "ok":
            try:
                self._begin()
            except InfraError as error:
                self.set_exception(error)
            return
        self.set_result(self._total(self._outcomes))


def check_secrets(terms: Sequence[Term]) -> None:
    """ConfigError if an environment variable that a term names is not set in this process."""
    for term in terms:
        for name in term.secrets:
            if not os.environ.get(name):
                raise ConfigError(f"reward {term.label!r}: the environment variable {name} that it names is not set")


def _done(score: Score) -> Future[Score]:
    future: Future[Score] = Future()
    future.set_result(score)
    return future


def reward_input(trajectory: Trajectory) -> RewardInput:
    """The input of reward functions. The prompt ends at the first token that the policy generated.

    Of a sample of several segments the ids are the new ones of all, one segment after the other.
    """
    mask = trajectory.loss_mask.data
    start = mask.index(1) if 1 in mask else len(mask)
    tokens = trajectory.tokens.numpy().tolist()
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
        _identity(trajectory),
    )


def _identity(trajectory: Trajectory) -> str:
    """A name of exactly this sample: a task that is done again makes other tokens, and they have another one."""
    digest = hashlib.blake2b(trajectory.tokens.data, digest_size=8).hexdigest()
    return f"{trajectory.run}-{trajectory.task_id}-{trajectory.sample}-{digest}"


def _last_row(trajectory: Trajectory) -> list[int]:
    """Tokens of the row with the main agent's last answer; of another agent's where it has none."""
    segments = list(enumerate(trajectory.segments))
    own = [(k, segment) for k, segment in segments if segment.name == "main"] or segments
    newest, _ = max(own, key=lambda one: (_last_call(trajectory, one[1]), one[0]))
    ids: list[int] = trajectory.tokens.numpy()[trajectory.rows()[newest].places].tolist()
    return ids


def _last_call(trajectory: Trajectory, segment: Segment) -> int:
    return max((turn.call for turn in trajectory.turns if segment.start <= turn.start < segment.end), default=-1)


def check_reward(
    terms: list[RewardTerm],
    base: Path,
    trajectory: Trajectory | None = None,
    timeout_s: float = 15.0,
    env: Sequence[str] = (),
    within_s: float | None = None,
) -> Score | None:
    """Import and check every term, without starting anything; with a trajectory, score it as well.

    ConfigError, in one line, if a term is wrong. The score's ``seconds`` leave out the start of the worker. within_s:
    there is no score where that takes longer, with the start.
    """
    resolve(terms, base)
    if trajectory is None:
        return None
    scorer = Scorer(terms, base, workers=1, timeout_s=timeout_s, env=env)
    try:
        return scorer.score([trajectory])[0] if within_s is None else scorer.submit(trajectory).result(within_s)
    except TimeoutError:
        return None
    finally:
        scorer.close()


def _start_timeout_s(terms: Sequence[Term]) -> float:
    """How long a worker of these terms may take to start: those that load something say so."""
    loads = any(getattr(term.function, "prepare", None) is not None for term in terms)
    return LOAD_TIMEOUT_S if loads else START_TIMEOUT_S
