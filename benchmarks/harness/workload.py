"""The workload of the benchmarks: trajectories of a chosen length, made once, and the shape of the pipeline."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from broker.client import Broker
from broker.connection.connection import Connection
from broker.connection.keys import Keys
from broker.flow.progress import TakeoverRequest
from broker.flow.trainer_session import TrainerSession
from schemas.codec import Array
from schemas.config import BrokerConfig
from schemas.messages import Sampling, Score, Span, Task, Trajectory

VARIANTS = 16
"""Number of different samples in the pool; task and sample number select one."""
ENDLESS = 1 << 30
"""Number of steps that no run reaches."""


@dataclass(frozen=True)
class PipelineShape:
    """The pipeline's shape: ``batch`` groups of ``samples`` a step, a checkpoint's commit every ``commit_every``."""

    samples: int = 8
    batch: int = 32
    staleness: int = 4
    commit_every: int = 10

    @property
    def per_step(self) -> int:
        """Trajectories in one optimizer step."""
        return self.samples * self.batch

    @property
    def slots(self) -> int:
        """Groups that may be in the pipeline."""
        return (self.staleness + 1) * self.batch

    def steps_for(self, trajectories: int) -> int:
        """Return the steps for about this number of trajectories, as a whole number of commits."""
        commits = max(1, round(trajectories / (self.per_step * self.commit_every)))
        return commits * self.commit_every


class TrajectoryPool:
    """Prepared arrays and texts of ``tokens`` tokens, a quarter of them prompt; four characters a token."""

    def __init__(self, tokens: int) -> None:
        rng = np.random.default_rng(tokens)
        self.tokens = tokens
        self._prompt = tokens // 4
        self._mask = np.zeros(tokens, dtype=np.uint8)
        self._mask[self._prompt :] = 1
        self._text = "".join(chr(97 + int(c)) for c in rng.integers(0, 26, 4 * tokens))
        self._ids: list[npt.NDArray[Any]] = []
        self._logprobs: list[npt.NDArray[Any]] = []
        for _ in range(VARIANTS):
            self._ids.append(rng.integers(0, 150_000, tokens).astype(np.int32))
            self._logprobs.append((-rng.exponential(0.5, tokens) * self._mask).astype(np.float32))

    def task(self, task_id: int, samples: int) -> Task:
        """Return the task of a prompt group."""
        return Task(
            task_id=task_id,
            kind="train",
            n=samples,
            sampling=Sampling(max_tokens=max(1, self.tokens - self._prompt)),
            text=self._text[: 4 * self._prompt],
            data={"answer": "42", "source": "bench"},
        )

    def trajectory(self, task: Task, sample: int, version: int) -> Trajectory:
        """Return a finished sample whose last half is of ``version``, and the tokens before of the version before."""
        variant = (task.task_id + sample) % VARIANTS
        middle = (self._prompt + self.tokens) // 2
        return Trajectory(
            run="bench",
            task_id=task.task_id,
            sample=sample,
            kind="train",
            tokens=Array.of(self._ids[variant], "i4"),
            loss_mask=Array.of(self._mask, "u1"),
            logprobs=Array.of(self._logprobs[variant], "f4"),
            spans=[Span(version, self._prompt, middle), Span(version, middle, self.tokens)],
            turns=[],
            finish="stop",
            prompt=self._text[: 4 * self._prompt],
            completion=self._text[4 * self._prompt :],
            generator="generator-0",
            seconds=1.0,
            data=task.data,
        )

    def score(self, trajectory: Trajectory) -> Score:
        """Return a score that costs nothing to compute."""
        return Score(reward=float(trajectory.sample % 2), components={"noop": 1.0}, seconds=0.0)

    def first_token(self, task_id: int, sample: int) -> int:
        """Return the first token that a sample must have when it arrives."""
        return int(self._ids[(task_id + sample) % VARIANTS][0])


class TrajectoryPools:
    """Pools of ``count`` lengths between ``shortest`` and ``longest`` tokens, each longer by the same factor."""

    def __init__(self, shortest: float, longest: float, count: int) -> None:
        self._sizes = np.unique(np.geomspace(shortest, longest, count).astype(int)).tolist()
        self._pools = [TrajectoryPool(size) for size in self._sizes]

    def of(self, tokens: float) -> TrajectoryPool:
        """Return the shortest pool with trajectories of so many tokens, or the longest pool."""
        return self._pools[min(bisect_left(self._sizes, tokens), len(self._sizes) - 1)]


def open_broker(url: str, run: str) -> Broker:
    """Open the run's broker with default settings."""
    config = BrokerConfig()
    return Broker(Connection(url, Keys(config.prefix, run), config.deadline_s), config)


def begin(training: TrainerSession, flow: PipelineShape) -> None:
    """Take a new run over, as a trainer without a checkpoint does."""
    training.take_over(
        TakeoverRequest(
            batch=flow.batch, staleness=flow.staleness, window=1, steps=ENDLESS, max_uncommitted=flow.commit_every
        )
    )
