"""Batches from the broker: assembled in admission order, checked for staleness, journaled before they are trained."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import structlog

from broker.flow.pipeline import PipelineSnapshot, ScoredSample, Slot
from consumers.trainer.algorithms.advantages import has_signal, within
from consumers.trainer.context import TrainerContext, describe_broken
from consumers.trainer.data.images import check_place
from consumers.trainer.data.microbatches import Batch, Group
from consumers.trainer.group_buffer import FailureStreak, GroupBuffer
from consumers.trainer.metrics.dataset_metrics import DatasetMeter, curriculum_figures
from consumers.trainer.metrics.group_metrics import GroupMeter, episode_metrics, term_metrics
from consumers.trainer.metrics.throughput import CountRate
from consumers.trainer.pause import PauseFollower
from schemas.codec import BadMessage
from schemas.errors import BrokerDamaged, DataError, InfraError, RunFailed
from schemas.images import image_size
from schemas.lifecycle import StopFlag
from schemas.messages import BatchRecord, GroupRef, Member, Trajectory

CLAIM = 2000
"""Most outcomes that are claimed at once."""

QUIET_S = 2.0
"""Seconds between two examinations of the oldest group, and without an outcome after which others are looked after."""

MANY_FILTERED = 4
"""Times a step's groups that came back one after another and taught nothing: then people are told."""


class NothingToLearn(RunFailed):
    """The prompts that come back teach the policy nothing any more; its weights are good."""


log = structlog.get_logger()


class BatchSource:
    """The batches of a trainer: ``next`` waits for those of a step, ``replay`` reads a journaled step's again.

    pause: people's orders are followed between steps, and while no batch comes. on_idle: called while nothing comes
    in, to look for what generators and feeder may wait for.
    """

    def __init__(self, context: TrainerContext, pause: PauseFollower, on_idle: Callable[[], None]) -> None:
        self._config = context.config
        self._session = context.session
        self._settings = context.settings
        self._images = context.broker.images
        self._image_settings = context.rank_group.step.planner.images
        self._router_replay = context.rank_group.step.policy.router_replay
        self._progress = context.progress
        self._pause = pause
        self._on_idle = on_idle
        self._notify = context.notify
        self._buffer = GroupBuffer(context.config.flow.window)
        self._failures = FailureStreak(context.config.trainer.failed_groups_limit)
        self._claimed: dict[bytes, ScoredSample] = {}
        self._taken: list[tuple[Group, list[ScoredSample]]] = []
        self._meter = GroupMeter()
        self._generated = CountRate()
        self._datasets = DatasetMeter()
        self._deadline = 0.0
        self._told_filtered = False
        self._filtered_at = 0.0
        self._examined_at = self._last_outcome_at = time.monotonic()

    def next(self, new_version: int, stop: StopFlag) -> Batch | None:
        """The next step's batch, in the journal; None when asked to stop.

        InfraError after the deadline, but NothingToLearn when groups came back until then, as many in a row as the step
        needs, and taught nothing. RunFailed when trainer.max_failed_groups in a row have failed.

        new_version: the version that the step will make.
        """
        self._taken = []
        self._told_filtered = False
        self._extend_deadline()
        while not self._try_assemble():
            if not self._wait_for_outcomes(stop):
                return None
        references = [_reference(outcomes) for _, outcomes in self._taken]
        progress = self._progress
        record = BatchRecord(step=progress.step, version=progress.version, new_version=new_version, groups=references)
        self._session.journal_batch(record)
        batch = self._make_batch(record, [group for group, _ in self._taken])
        generated = self._generated.of(self._pipeline.counts.get("tokens_generated", 0), time.monotonic())
        known = {} if generated is None else {"perf/generated_tokens_per_s": generated}
        return replace(batch, figures={**batch.figures, **known})

    def _try_assemble(self) -> bool:
        """Take groups for the step; True when it has all of them, False also while the trainer has to pause."""
        while True:
            self._claim()
            pipeline = self._pipeline = self._session.read_pipeline()
            self._progress.update(pipeline)
            self._check_failures(pipeline)
            if self._pause.follow(pipeline.control):
                return False
            self._discard_ended({slot.task_id for slot in pipeline.slots} | self._taken_ids())
            chosen = self._choose(pipeline)
            self._taken += self._usable(chosen, pipeline.staleness)
            if len(self._taken) >= pipeline.batch:
                return True
            if not chosen:
                return False

    def _check_failures(self, pipeline: PipelineSnapshot) -> None:
        """Raise RunFailed when so many groups failed one after another that the next ones will, too."""
        text = self._failures.find(slot.task_id for slot in pipeline.slots)
        if text is not None:
            self._notify("run_failed", "error", text)
            raise RunFailed(text)

    def _choose(self, pipeline: PipelineSnapshot) -> list[int]:
        """Task ids of complete groups, for the places that are left in the step."""
        active = self._untaken_slots(pipeline)
        chosen: list[int] = []
        while len(self._taken) + len(chosen) < pipeline.batch:
            slot = self._buffer.choose(active)
            if slot is None:
                break
            active.remove(slot)
            chosen.append(slot.task_id)
        return chosen

    def _wait_for_outcomes(self, stop: StopFlag) -> bool:
        """Wait for outcomes, or for the end of a pause; False when asked to stop, or when there are steps enough.

        InfraError after the deadline.
        """
        pipeline = self._pipeline
        if stop or self._progress.step >= self._settings.steps:
            return False
        active = self._untaken_slots(pipeline)
        if self._pause.reasons or (not active and self._pause.follow(pipeline.control, drained=True)):
            self._pause.wait_order_after(pipeline.control.pause_id)
            self._extend_deadline()
            return True
        if self._meter.in_vain >= MANY_FILTERED * pipeline.batch and not self._told_filtered:
            self._told_filtered = True
            self._notify(
                "nothing_to_learn", "warning", f"step {self._progress.step}: {self._meter.describe_filtered()}"
            )
        if time.monotonic() > self._deadline:
            self._fail_if_filtered(pipeline)
            raise InfraError(
                f"step {self._progress.step} waited {self._config.trainer.batch_timeout_s:.0f} s for"
                f" {pipeline.batch} prompt groups and has {len(self._taken)}:"
                f" {self._buffer.describe_missing(active)}{self._meter.describe()}"
            )
        now = time.monotonic()
        if active and now - self._examined_at > QUIET_S:
            # Also while others come: what is filtered of them frees slots for more, on and on.
            self._examined_at = now
            self._examine(active[0].task_id)
            if now - self._last_outcome_at > QUIET_S:
                self._on_idle()
        self._session.wait_for_scores()
        return True

    def _fail_if_filtered(self, pipeline: PipelineSnapshot) -> None:
        """Raise NothingToLearn where a step is not complete because groups teach nothing: a restart changes nothing.

        That is not known where a group between them taught something, or where none has come for long: then the step
        waits for generators, too.
        """
        silent = time.monotonic() - self._filtered_at > self._config.trainer.batch_timeout_s / 2
        if self._meter.in_vain < pipeline.batch or silent:
            return
        text = (
            f"step {self._progress.step} has {len(self._taken)} of {pipeline.batch} prompt groups after"
            f" {self._config.trainer.batch_timeout_s:.0f} s: {self._meter.describe_filtered()}; the task is learned, or"
            " too hard: take other prompts, or train such groups with trainer.advantage.keep_zero_variance: true"
        )
        self._notify("run_failed", "error", text)
        raise NothingToLearn(text)

    def _extend_deadline(self) -> None:
        self._deadline = time.monotonic() + self._config.trainer.batch_timeout_s

    def _taken_ids(self) -> set[int]:
        return {group.task_id for group, _ in self._taken}

    def _untaken_slots(self, pipeline: PipelineSnapshot) -> list[Slot]:
        """Slots of groups that this step has not taken, in admission order."""
        taken = self._taken_ids()
        return [slot for slot in pipeline.slots if slot.task_id not in taken]

    def replay(self, record: BatchRecord) -> Batch:
        """The batch of a journaled step, with the same data; BrokerDamaged when the broker has lost some of it."""
        self._claim()
        groups = []
        for reference in record.groups:
            ids = [member.trajectory_id for member in reference.members if member.trajectory_id]
            scores = [self._claimed.get(member.scored_id) for member in reference.members if member.trajectory_id]
            bodies = self._session.fetch_trajectories(ids)
            samples = [
                (body, score.score.reward)
                for body, score in zip(bodies, scores, strict=True)
                if isinstance(body, Trajectory) and score
            ]
            if len(samples) < len(ids):
                raise BrokerDamaged(f"the broker has lost a part of journaled step {record.step}")
            self._buffer.take(reference.task_id)
            groups.append(Group(reference.task_id, samples, self._fetch_images([body for body, _ in samples])))
        return self._make_batch(record, groups)

    def keep_uncommitted(self, records: Sequence[BatchRecord]) -> None:
        """Keep the data of steps that are in the weights already, until a checkpoint covers them."""
        self._claim()
        for record in records:
            for group in record.groups:
                self._buffer.take(group.task_id)

    def _make_batch(self, record: BatchRecord, groups: list[Group]) -> Batch:
        members = [member.scored_id for group in record.groups for member in group.members]
        outcomes = [self._claimed[entry] for entry in members if entry in self._claimed]
        terms = {(one.task_id, one.sample): one.score.components for one in outcomes if one.trajectory_id}
        metrics = [trajectory.metrics for group in groups for trajectory, _ in group.samples]
        progress = self._progress
        figures = self._meter.take() | self._datasets.take() | curriculum_figures(progress.counts, progress.prompts)
        figures |= term_metrics([*terms.values()]) | episode_metrics(metrics)
        by_task: dict[int, list[ScoredSample]] = {}
        for outcome in outcomes:
            by_task.setdefault(outcome.task_id, []).append(outcome)
        rates = {task_id: rate for task_id, of in by_task.items() if (rate := _solve_rate(of)) is not None}
        return Batch(record, groups, sum(outcome.excluded for outcome in outcomes), figures, terms, rates)

    def forget_covered(self, records: Sequence[BatchRecord]) -> None:
        """Forget the outcomes of steps that a checkpoint covers."""
        for record in records:
            for group in record.groups:
                for member in group.members:
                    self._claimed.pop(member.scored_id, None)

    def _examine(self, task_id: int) -> None:
        """BrokerDamaged when something is missing that the oldest group, which holds all others up, waits for."""
        if self._session.diagnose_group(task_id) == "complete":
            # Its last outcome may just have come in, and may end it.
            self._claim()
            if not self._buffer.is_complete(task_id) and self._session.diagnose_group(task_id) == "complete":
                raise BrokerDamaged(f"the broker has lost scores of prompt group {task_id}")

    def _discard_ended(self, active: set[int]) -> None:
        """Remove outcomes of groups that hold no slot any more, or never did."""
        for task_id in self._buffer.waiting_ids() - active:
            outcomes = self._buffer.take(task_id)
            self._session.discard_scores(outcomes)
            for outcome in outcomes:
                self._claimed.pop(outcome.scored_id, None)

    def _claim(self) -> None:
        while True:
            outcomes = self._session.claim_scores(CLAIM)
            if outcomes:
                self._last_outcome_at = time.monotonic()
            for outcome in outcomes:
                self._claimed[outcome.scored_id] = outcome
                if self._buffer.add(outcome):
                    self._drop_if_useless(outcome.task_id)
            if len(outcomes) < CLAIM:
                return

    def _drop_if_useless(self, task_id: int) -> None:
        """End a complete group that would teach nothing: its slot returns at once, out of turn."""
        outcomes = self._buffer.take(task_id)
        rewards = [outcome.score.reward for outcome in outcomes if outcome.trajectory_id]
        broken = {outcome.sample: outcome.score.broken_version for outcome in outcomes}
        versions = [version for version in broken.values() if version >= 0]
        settings = self._config.trainer.advantage
        term = settings.filter_term or ""
        compared = [
            outcome.score.components.get(term, outcome.score.reward) for outcome in outcomes if outcome.trajectory_id
        ]
        # A sample's second outcome, behind these, says nothing of it.
        firsts = outcomes[: outcomes[0].group_size]
        lost = [outcome for outcome in firsts if not outcome.trajectory_id]
        failed = [outcome.score.failure or "workflow" for outcome in lost if not outcome.excluded]
        self._meter.lose(failed, len(lost) - len(failed))
        if rewards:
            self._count_dataset(outcomes, rewards)
            self._meter.add(rewards, has_signal(compared, settings.least_std), compared)
        if 2 * len(versions) > outcomes[0].group_size:
            self._failures.failed(task_id, describe_broken(max(versions)))
            self._end_group(task_id, outcomes, "not_finite", "failed")
        elif not rewards:
            self._failures.failed(task_id, _why_failed(outcomes))
            self._end_group(task_id, outcomes, "no_reward", "failed")
        elif settings.partial_groups == "drop" and len(rewards) < outcomes[0].group_size:
            self._failures.failed(task_id, _why_failed(outcomes))
            self._end_group(task_id, outcomes, "partial")
        else:
            self._failures.succeeded(task_id)
            self._drop_without_signal(task_id, outcomes, compared)

    def _count_dataset(self, outcomes: Sequence[ScoredSample], rewards: Sequence[float]) -> None:
        scores = [outcome.score for outcome in outcomes if outcome.trajectory_id]
        if scores[0].dataset:
            correct = [score.correct for score in scores]
            self._datasets.add(scores[0].dataset, rewards, correct, scores[0].level)

    def _drop_without_signal(self, task_id: int, outcomes: list[ScoredSample], rewards: list[float]) -> None:
        """End a group whose rewards, or the term of them that filters, tell nothing; keep any other."""
        settings = self._config.trainer.advantage
        if settings.drops_zero_variance and not has_signal(rewards, settings.least_std):
            why = "zero_variance"
        elif not within(rewards, settings.mean_between):
            why = "mean_reward"
        else:
            self._meter.keep()
            for outcome in outcomes:
                self._buffer.add(outcome)
            return
        self._filtered_at = time.monotonic()
        self._end_group(task_id, outcomes, why)

    def _usable(self, task_ids: Sequence[int], staleness: int) -> Iterator[tuple[Group, list[ScoredSample]]]:
        """Load the trajectories of groups, and leave out those that are dropped for their age."""
        version = self._progress.version
        taken = [self._buffer.take(task_id) for task_id in task_ids]
        scored = [[outcome for outcome in outcomes if outcome.trajectory_id] for outcomes in taken]
        bodies = iter(
            self._session.fetch_trajectories([outcome.trajectory_id or b"" for group in scored for outcome in group])
        )
        for task_id, outcomes, members in zip(task_ids, taken, scored, strict=True):
            found = [(next(bodies), outcome.score.reward) for outcome in members]
            if any(body is None for body, _ in found):
                # Perhaps it only went back in time since the last look, which is mended with less.
                self._session.read_pipeline()
                raise BrokerDamaged(f"the broker has lost samples of prompt group {task_id}")
            samples = [(body, reward) for body, reward in found if isinstance(body, Trajectory)]
            if len(samples) < len(found):
                why = next(str(body) for body, _ in found if isinstance(body, BadMessage))
                log.warning("a sample of the group can't be trained", task_id=task_id, reason=why)
                self._failures.failed(task_id, why)
                self._end_group(task_id, outcomes, "unreadable", "failed")
                continue
            # A sample may have no token of its own, because its environment failed at once: it has no age.
            oldest = min((body.oldest_version for body, _ in samples if body.oldest_version >= 0), default=None)
            if oldest is None:
                self._failures.failed(task_id, "no sample has a token that the policy sampled")
                self._end_group(task_id, outcomes, "no_tokens")
                continue
            if version - oldest > staleness:
                log.warning("group is too old", task_id=task_id, oldest=oldest, version=version)
                self._end_group(task_id, outcomes, "stale")
                continue
            group = Group(task_id, samples, self._fetch_images([body for body, _ in samples]))
            for what, problem in (
                ("images", self._find_image_problem(group)),
                ("routed_experts", self._find_expert_problem(group)),
            ):
                if problem is not None:
                    log.warning("group does not fit the model", task_id=task_id, what=what, reason=problem)
                    self._failures.failed(task_id, problem)
                    self._end_group(task_id, outcomes, what, "failed")
                    break
            else:
                yield group, outcomes

    def _fetch_images(self, samples: Sequence[Trajectory]) -> dict[str, bytes]:
        """Bytes of the images of samples by digest; BrokerDamaged when one is gone."""
        wanted = {image.digest for sample in samples for image in sample.images}
        found = self._images.fetch(wanted) if wanted else {}
        if len(found) < len(wanted):
            self._session.read_pipeline()
            raise BrokerDamaged(f"the broker has lost images of prompt group {samples[0].task_id}")
        return found

    def _find_image_problem(self, group: Group) -> str | None:
        """Say why a group's images can't be what its tokens stand for; None where they can."""
        if not group.images:
            return None
        if self._image_settings is None:
            return "it has images, and this trainer was started with model.kind text"
        try:
            grids = {digest: self._image_settings.grid(*image_size(body)) for digest, body in group.images.items()}
            for sample, _ in group.samples:
                for image in sample.images:
                    check_place(image, grids[image.digest], self._image_settings)
        except DataError as error:
            return str(error)
        return None

    def _find_expert_problem(self, group: Group) -> str | None:
        """Say why the model's routers can't repeat what was noted of a group; None where they can."""
        if self._router_replay is None:
            return None
        found = (self._router_replay.find_problem(one.routed_experts) for one, _ in group.samples if one.routed_experts)
        return next((problem for problem in found if problem is not None), None)

    def _end_group(self, task_id: int, outcomes: Sequence[ScoredSample], reason: str, how: str = "dropped") -> None:
        """End a group without training it; its slot returns."""
        self._meter.drop(reason)
        scored, rate = [outcome.scored_id for outcome in outcomes], _solve_rate(outcomes)
        if self._session.drop_group(task_id, reason, scored, how, rate):
            self._progress.unfinished.discard(task_id)
        for outcome in outcomes:
            self._claimed.pop(outcome.scored_id, None)


def _solve_rate(outcomes: Sequence[ScoredSample]) -> float | None:
    """Return the share of correct samples among those that were scored, None where none was."""
    correct = [outcome.score.correct for outcome in outcomes if outcome.trajectory_id]
    return sum(correct) / len(correct) if correct else None


def _why_failed(outcomes: Sequence[ScoredSample]) -> str:
    """Return the reason of a group's first sample that has no reward."""
    first = next(outcome for outcome in outcomes if not outcome.trajectory_id)
    reason = first.score.reason or "no reason is known"
    return f"reward {reason}" if first.excluded else reason


def _reference(outcomes: Sequence[ScoredSample]) -> GroupRef:
    members = [Member(outcome.sample, outcome.scored_id, outcome.trajectory_id or b"") for outcome in outcomes]
    return GroupRef(outcomes[0].task_id, members)
