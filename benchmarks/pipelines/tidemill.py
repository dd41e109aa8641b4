"""The real pipeline, through the broker package with every guarantee on, without models.

Three processes: a producer (admission by the ledger, the task queue, publishing), a no-op reward (read, publish
with acknowledgement), and a batch assembler (fenced claim in admission order, staleness check, journal, fetch,
numpy arrays, step, and a commit every few steps). Not part of it: turning an engine's lists into arrays,
weights, heartbeats and lease renewals (one call in ten seconds each).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.harness.workload import PipelineShape, TrajectoryPool, begin, open_broker
from broker.flow.pipeline import ScoredSample
from broker.queues.consumer_group import Delivery
from consumers.trainer.group_buffer import GroupBuffer
from schemas.errors import InfraError
from schemas.messages import BatchRecord, GroupRef, Member, Task, Trajectory

GROUPS_AT_ONCE = 8
"""Groups that the producer handles at once: 128 samples."""
REWARDS_AT_ONCE = 64
"""Samples that the reward service reads at once."""
CLAIM = 2000
"""Samples that the trainer claims at once."""


class Producer:
    """Feeder and generator in one."""

    def __init__(self, url: str, run: str, pool: TrajectoryPool, flow: PipelineShape) -> None:
        broker = open_broker(url, run)
        self._ledger = broker.ledger
        self._queue = broker.task_queue("generator-0")
        self._pool = pool
        self._flow = flow
        self._cursor = 0

    def run(self, steps: int) -> dict[str, Any]:
        last = self._cursor + steps * self._flow.batch
        missing = steps * self._flow.batch
        while missing:
            position = self._ledger.change_position()
            self._admit(last)
            deliveries = self._queue.read(GROUPS_AT_ONCE, 1)
            if not deliveries:
                self._ledger.wait_change(position)
                continue
            answers = self._queue.publish_all([self._generate(item) for item in deliveries])
            if any(answer != "ok" for words in answers for answer in words):
                raise InfraError(f"samples were refused: {answers}")
            for delivery in deliveries:
                self._queue.release(delivery)
            missing -= len(deliveries)
        return {}

    def _generate(self, delivery: Delivery[Task]) -> tuple[int, list[Trajectory]]:
        task = delivery.message
        return task.task_id, [self._pool.trajectory(task, sample, delivery.version) for sample in range(task.n)]

    def _admit(self, last: int) -> None:
        ids = range(self._cursor, min(last, self._cursor + GROUPS_AT_ONCE))
        if ids:
            tasks = [self._pool.task(task_id, self._flow.samples) for task_id in ids]
            self._cursor = self._ledger.admit_all(tasks).next


class Rewarder:
    """The reward service without a reward function."""

    def __init__(self, url: str, run: str, pool: TrajectoryPool, flow: PipelineShape) -> None:
        self._queue = open_broker(url, run).score_queue("reward-0")
        self._pool = pool
        self._flow = flow

    def run(self, steps: int) -> dict[str, Any]:
        missing = steps * self._flow.per_step
        while missing:
            deliveries = self._queue.read(REWARDS_AT_ONCE)
            self._queue.publish([(item, self._pool.score(item.message)) for item in deliveries])
            missing -= len(deliveries)
        return {}


class Assembler:
    """The trainer without a model. Every sample must arrive once, whole, in admission order; else InfraError."""

    def __init__(self, url: str, run: str, pool: TrajectoryPool, flow: PipelineShape) -> None:
        self._training = open_broker(url, run).trainer_session()
        begin(self._training, flow)
        self._buffer = GroupBuffer(window=1)
        self._pool = pool
        self._flow = flow
        self._step = 0
        self._complete = 0
        self._uncommitted: list[BatchRecord] = []

    def run(self, steps: int) -> dict[str, Any]:
        for _ in range(steps):
            self._train()
        return {"trained": steps * self._flow.per_step}

    def _train(self) -> None:
        groups = self._groups()
        record = BatchRecord(
            step=self._step,
            version=self._step,
            new_version=self._step + 1,
            groups=[reference(group) for group in groups],
        )
        bodies = self._training.fetch_trajectories(
            [outcome.trajectory_id or b"" for group in groups for outcome in group]
        )
        arrays = self._arrays([outcome for group in groups for outcome in group], bodies)
        self._training.journal_batch(record)
        self._training.complete_step(record)
        self._step += 1
        self._uncommitted.append(record)
        if len(arrays) != self._flow.per_step:
            raise InfraError(f"step {self._step} has {len(arrays)} samples instead of {self._flow.per_step}")
        if self._step % self._flow.commit_every == 0:
            self._training.commit_steps(self._uncommitted)
            self._uncommitted.clear()

    def _groups(self) -> list[list[ScoredSample]]:
        while True:
            if self._complete >= self._flow.batch:
                active = self._training.read_pipeline().slots
                chosen = active[: self._flow.batch]
                if all(self._buffer.is_complete(slot.task_id) for slot in chosen):
                    break
            outcomes = self._training.claim_scores(CLAIM)
            self._complete += sum(self._buffer.add(outcome) for outcome in outcomes)
            if not outcomes:
                self._training.wait_for_scores()
        first = self._step * self._flow.batch
        if [slot.task_id for slot in chosen] != list(range(first, first + self._flow.batch)):
            raise InfraError(f"step {self._step} has groups {[slot.task_id for slot in chosen]}, out of order")
        self._complete -= len(chosen)
        return [self._buffer.take(slot.task_id) for slot in chosen]

    def _arrays(self, outcomes: list[ScoredSample], bodies: Sequence[object]) -> list[tuple[Any, ...]]:
        """Return tokens, mask, log-probabilities and versions of each sample; each [T]."""
        arrays = []
        for outcome, body in zip(outcomes, bodies, strict=True):
            if not isinstance(body, Trajectory) or (body.task_id, body.sample) != (outcome.task_id, outcome.sample):
                raise InfraError(f"sample {outcome.task_id}:{outcome.sample} was lost")
            if self._step - body.oldest_version > self._flow.staleness:
                raise InfraError(f"sample {outcome.task_id}:{outcome.sample} is too old")
            tokens = body.tokens.numpy()
            if tokens[0] != self._pool.first_token(outcome.task_id, outcome.sample):
                raise InfraError(f"sample {outcome.task_id}:{outcome.sample} arrived damaged")
            arrays.append((tokens, body.loss_mask.numpy(), body.logprobs.numpy(), body.versions()))
        return arrays


def reference(outcomes: list[ScoredSample]) -> GroupRef:
    """Return a group as the journal records it."""
    members = [Member(outcome.sample, outcome.scored_id, outcome.trajectory_id or b"") for outcome in outcomes]
    return GroupRef(outcomes[0].task_id, members)
