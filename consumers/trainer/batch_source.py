"""Batches from the broker: the groups that a step waits for, in the journal before they are trained."""

import time
from collections.abc import Callable
from dataclasses import replace

from broker.flow.pipeline import PipelineSnapshot, ScoredSample, Slot
from consumers.trainer.context import TrainerContext
from consumers.trainer.data.groups import Batch, Group
from consumers.trainer.generator_watches import find_quarantined
from consumers.trainer.group_intake import GroupIntake, solve_rate
from consumers.trainer.metrics.dataset_metrics import curriculum_figures
from consumers.trainer.metrics.group_metrics import episode_metrics, term_metrics
from consumers.trainer.metrics.throughput import CountRate
from consumers.trainer.pause import PauseFollower
from schemas.errors import InfraError, RunFailed
from schemas.messages import BatchRecord, GroupRef, Member
from schemas.system.lifecycle import StopFlag

QUIET_S = 2.0
"""Seconds between two checks of the oldest group, and without an outcome before ``on_idle`` is called."""

MANY_FILTERED = 4
"""Batches of useless groups in a row after which a warning is sent."""


class NothingToLearn(RunFailed):
    """The prompts teach the policy nothing any more; its weights are good."""


class BatchSource:
    """The batches of a trainer: ``next`` waits for that of a step, ``replay`` reads that of a journaled step again.

    pause: follows orders between steps, and while no batch comes. on_idle: called while no outcomes come, to provide
    what generators and feeder may wait for. intake: the groups that batches are made of.
    """

    def __init__(self, context: TrainerContext, pause: PauseFollower, on_idle: Callable[[], None]) -> None:
        self.intake = GroupIntake(context)
        self._context, self._pause, self._on_idle = context, pause, on_idle
        self._timeout_s = context.config.trainer.batch_timeout_s
        self._session = context.session
        self._progress = context.progress
        self._taken: list[tuple[Group, list[ScoredSample]]] = []
        self._generated = CountRate()
        self._deadline = 0.0
        self._told_filtered = False
        self._examined_at = time.monotonic()

    def next(self, new_version: int, stop: StopFlag) -> Batch | None:
        """Return the batch of the next step, which is in the journal; None if asked to stop.

        InfraError after the deadline, or NothingToLearn if at least a batch of groups came in a row and taught nothing.
        RunFailed if trainer.max_failed_groups in a row have failed. new_version: version that the step will make.
        """
        self._taken = []
        self._told_filtered = False
        self._extend_deadline()
        while not self._try_assemble(stop):
            if not self._wait_for_outcomes(stop):
                return None
        references = [
            GroupRef(group.task_id, [Member(one.sample, one.scored_id, one.trajectory_id or b"") for one in outcomes])
            for group, outcomes in self._taken
        ]
        progress = self._progress
        record = BatchRecord(step=progress.step, version=progress.version, new_version=new_version, groups=references)
        self._session.journal_batch(record)
        batch = self._make_batch(record, [group for group, _ in self._taken])
        generated = self._generated.of(self._pipeline.counts.get("tokens_generated", 0), time.monotonic())
        if generated is None:
            return batch
        return replace(batch, figures={**batch.figures, "perf/generated_tokens_per_s": generated})

    def replay(self, record: BatchRecord) -> Batch:
        """Return the batch of a journaled step, with the same data; BrokerDamaged if the broker has lost some of it."""
        return self._make_batch(record, self.intake.take_again(record))

    def _try_assemble(self, stop: StopFlag) -> bool:
        """Take groups for the step; True if it has all of them, False also if the trainer has to pause or stop."""
        while True:
            self.intake.claim()
            pipeline = self._pipeline = self._session.read_pipeline()
            self._progress.update(pipeline)
            self.intake.check_failures(pipeline)
            if self._pause.follow(pipeline.control):
                return False
            self.intake.discard_ended({slot.task_id for slot in pipeline.slots} | self._taken_ids())
            chosen = self.intake.choose(self._untaken_slots(pipeline), pipeline.batch - len(self._taken))
            quarantined = find_quarantined(pipeline.control, self._context.broker.heartbeats)
            self._taken += self.intake.take(chosen, pipeline.staleness, quarantined)
            if len(self._taken) >= pipeline.batch:
                return True
            # Groups that are dropped as stale may be many.
            if not chosen or stop:
                return False

    def _wait_for_outcomes(self, stop: StopFlag) -> bool:
        """Wait for outcomes or the end of a pause; False to stop or after the last step, InfraError if too late."""
        pipeline = self._pipeline
        if stop or self._progress.step >= self._context.settings.steps:
            return False
        self._context.rank_group.give_if_due()
        active = self._untaken_slots(pipeline)
        if self._pause.reasons or (not active and self._pause.follow(pipeline.control, drained=True)):
            self._pause.wait_order_after(pipeline.control.pause_id)
            self._extend_deadline()
            return True
        meter = self.intake.meter
        if meter.in_vain >= MANY_FILTERED * pipeline.batch and not self._told_filtered:
            self._told_filtered = True
            text = f"step {self._progress.step}: {meter.describe_filtered()}"
            self._context.notify("nothing_to_learn", "warning", text)
        if time.monotonic() > self._deadline:
            self._fail_if_filtered(pipeline)
            raise InfraError(
                f"step {self._progress.step} waited {self._timeout_s:.0f} s for {pipeline.batch} prompt groups and has"
                f" {len(self._taken)}: {self.intake.describe_missing(active)}"
            )
        now = time.monotonic()
        if active and now - self._examined_at > QUIET_S:
            # Also while others come: those that are filtered out free slots for more, without end.
            self._examined_at = now
            self.intake.examine(active[0].task_id)
            if now - self.intake.last_outcome_at > QUIET_S:
                self._on_idle()
        self._session.wait_for_scores()
        return True

    def _fail_if_filtered(self, pipeline: PipelineSnapshot) -> None:
        """Raise NothingToLearn if a step is incomplete because groups teach nothing; a restart would not help.

        If a group taught something, or none has come for long, the step may also be waiting for generators.
        """
        meter = self.intake.meter
        silent = time.monotonic() - self.intake.filtered_at > self._timeout_s / 2
        if meter.in_vain < pipeline.batch or silent:
            return
        text = (
            f"step {self._progress.step} has {len(self._taken)} of {pipeline.batch} prompt groups after"
            f" {self._timeout_s:.0f} s: {meter.describe_filtered()}; the task is learned, or"
            " too hard: take other prompts, or train such groups with trainer.advantage.keep_zero_variance: true"
        )
        self._context.notify("run_failed", "error", text)
        raise NothingToLearn(text)

    def _extend_deadline(self) -> None:
        self._deadline = time.monotonic() + self._timeout_s

    def _taken_ids(self) -> set[int]:
        return {group.task_id for group, _ in self._taken}

    def _untaken_slots(self, pipeline: PipelineSnapshot) -> list[Slot]:
        """Return the slots of groups that this step has not taken, in admission order."""
        taken = self._taken_ids()
        return [slot for slot in pipeline.slots if slot.task_id not in taken]

    def _make_batch(self, record: BatchRecord, groups: list[Group]) -> Batch:
        outcomes = self.intake.outcomes_of(record)
        terms = {(one.task_id, one.sample): one.score.components for one in outcomes if one.trajectory_id}
        metrics = [trajectory.metrics for group in groups for trajectory, _ in group.samples]
        progress = self._progress
        figures = self.intake.meter.take() | self.intake.datasets.take()
        figures |= curriculum_figures(progress.counts, progress.prompts)
        figures |= term_metrics([*terms.values()]) | episode_metrics(metrics)
        by_task: dict[int, list[ScoredSample]] = {}
        for outcome in outcomes:
            by_task.setdefault(outcome.task_id, []).append(outcome)
        rates = {task_id: rate for task_id, of in by_task.items() if (rate := solve_rate(of)) is not None}
        return Batch(record, groups, sum(outcome.excluded for outcome in outcomes), figures, terms, rates)
