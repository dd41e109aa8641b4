"""Prompt groups as their scores arrive. Groups that teach nothing, failed, are too old or do not fit end at once.

The others are kept until a step takes them, and their outcomes until a checkpoint covers that step.
"""

import time
from collections.abc import Collection, Iterator, Sequence

import msgspec
import numpy as np
import structlog

from broker.flow.pipeline import PipelineSnapshot, ScoredSample, Slot
from consumers.trainer.algorithms.advantages import has_signal, within
from consumers.trainer.context import TrainerContext, describe_broken
from consumers.trainer.data.groups import Group
from consumers.trainer.data.patches import check_place
from consumers.trainer.group_buffer import FailureStreak, GroupBuffer
from consumers.trainer.metrics.dataset_metrics import DatasetMeter
from consumers.trainer.metrics.group_metrics import GroupMeter
from schemas.codec import BadMessage
from schemas.errors import BrokerDamaged, DataError, RunFailed
from schemas.images import image_size
from schemas.messages import UNREWARDED, BatchRecord, Score, Trajectory

CLAIM = 2000
"""Most outcomes that are claimed at once."""

log = structlog.get_logger()


class GroupIntake:
    """The groups of a trainer's steps: ``claim`` outcomes, ``choose`` complete groups, ``take`` their samples.

    meter, datasets: metrics of all groups that arrived since the last step. filtered_at, last_outcome_at: when the last
    group ended because it teaches nothing, and when the last outcome came, on the clock ``time.monotonic``.
    """

    def __init__(self, context: TrainerContext) -> None:
        self.meter = GroupMeter()
        self.datasets = DatasetMeter()
        self.filtered_at = 0.0
        self.last_outcome_at = time.monotonic()
        self._context = context
        self._session = context.session
        self._traces = context.traces
        self._image_settings = context.rank_group.step.planner.images
        self._taught = frozenset(context.config.teacher_weights)
        self._supervised = frozenset(context.config.supervised_weights)
        self._router_replay = context.rank_group.step.policy.router_replay
        self._output_tokens = context.rank_group.step.policy.output_tokens
        self._buffer = GroupBuffer(context.config.flow.window)
        self._failures = FailureStreak(context.config.trainer.failed_groups_limit)
        self._claimed: dict[bytes, ScoredSample] = {}

    def claim(self) -> None:
        """Claim all outcomes so far, and end the groups that they complete and that teach nothing."""
        while True:
            outcomes = self._session.claim_scores(CLAIM)
            if outcomes:
                self.last_outcome_at = time.monotonic()
            failed = [outcome for outcome in outcomes if not outcome.trajectory_id and outcome.sample >= 0]
            for outcome in failed:
                self._traces.failed(outcome.task_id, outcome.sample, outcome.score)
            if failed:
                # Their group may end at once, and is never claimed again.
                self._traces.flush()
            for outcome in outcomes:
                if outcome.task_id >= 0 > outcome.sample:
                    # The group may have been requeued since.
                    self._discard([*self._buffer.take(outcome.task_id), outcome])
                    continue
                self._claimed[outcome.scored_id] = outcome
                if self._buffer.add(outcome):
                    self._drop_if_useless(outcome.task_id)
            if len(outcomes) < CLAIM:
                return

    def check_failures(self, pipeline: PipelineSnapshot) -> None:
        """Raise RunFailed if so many groups failed in a row that the next ones will, too."""
        text = self._failures.find(slot.task_id for slot in pipeline.slots)
        if text is not None:
            self._context.notify("run_failed", "error", text)
            raise RunFailed(text)

    def discard_ended(self, active: set[int]) -> None:
        """Remove outcomes of groups that hold no slot any more, or never did."""
        for task_id in self._buffer.waiting_ids() - active:
            self._discard(self._buffer.take(task_id))

    def choose(self, active: Sequence[Slot], most: int) -> list[int]:
        """Return task ids of up to ``most`` complete groups. active: slots of groups not taken, by admission."""
        left, chosen = [*active], list[int]()
        while len(chosen) < most:
            slot = self._buffer.choose(left)
            if slot is None:
                break
            left.remove(slot)
            chosen.append(slot.task_id)
        return chosen

    def take(
        self, task_ids: Sequence[int], staleness: int, quarantined: Collection[str] = ()
    ) -> Iterator[tuple[Group, list[ScoredSample]]]:
        """Load groups, and drop those that are too old, do not fit the model, or have samples of ``quarantined``."""
        version = self._context.progress.version
        taken = [self._buffer.take(task_id) for task_id in task_ids]
        scored = [[outcome for outcome in outcomes if outcome.trajectory_id] for outcomes in taken]
        bodies = iter(
            self._session.fetch_trajectories([outcome.trajectory_id or b"" for group in scored for outcome in group])
        )
        for task_id, outcomes, members in zip(task_ids, taken, scored, strict=True):
            found = [(self._join(next(bodies), outcome.score), outcome.score.reward) for outcome in members]
            if any(body is None for body, _ in found):
                # The broker may only have gone back in time, which takes a smaller repair.
                self._session.read_pipeline()
                raise BrokerDamaged(f"the broker has lost samples of prompt group {task_id}")
            samples = [(body, reward) for body, reward in found if isinstance(body, Trajectory)]
            if len(samples) < len(found):
                why = next(str(body) for body, _ in found if isinstance(body, BadMessage))
                log.warning("a sample of the group can't be trained", task_id=task_id, reason=why)
                self._end_group(task_id, outcomes, "unreadable", "failed", failure=why)
                continue
            if any(body.generator in quarantined for body, _ in samples):
                self._end_group(task_id, outcomes, "mismatch")
                continue
            # A sample may have no token of its own, because its environment failed at once: it has no age.
            oldest = min((body.oldest_version for body, _ in samples if body.oldest_version >= 0), default=None)
            if oldest is None:
                why = "no sample has a token that the policy sampled"
                self._end_group(task_id, outcomes, "no_tokens", failure=why)
                continue
            if version - oldest > staleness:
                log.warning("group is too old", task_id=task_id, oldest=oldest, version=version)
                self._end_group(task_id, outcomes, "stale")
                continue
            group = Group(task_id, samples, self._fetch_images([body for body, _ in samples]))
            for what, problem in (
                ("images", self._find_image_problem(group)),
                ("routed_experts", self._find_expert_problem(group)),
                ("output_tokens", self._find_token_problem(group)),
            ):
                if problem is not None:
                    log.warning("group does not fit the model", task_id=task_id, what=what, reason=problem)
                    self._end_group(task_id, outcomes, what, "failed", failure=problem)
                    break
            else:
                yield group, outcomes

    def take_again(self, record: BatchRecord) -> list[Group]:
        """Return the groups of a journaled step, with the same data; BrokerDamaged if some of it is lost."""
        self.claim()
        groups = []
        for reference in record.groups:
            members = [member for member in reference.members if member.trajectory_id]
            scores = [self._claimed.get(member.scored_id) for member in members]
            bodies = self._session.fetch_trajectories([member.trajectory_id for member in members])
            samples = [
                (joined, score.score.reward)
                for body, score in zip(bodies, scores, strict=True)
                if score and isinstance(joined := self._join(body, score.score), Trajectory)
            ]
            if len(samples) < len(members):
                raise BrokerDamaged(f"the broker has lost a part of journaled step {record.step}")
            self._buffer.take(reference.task_id)
            groups.append(Group(reference.task_id, samples, self._fetch_images([body for body, _ in samples])))
        return groups

    def keep_uncommitted(self, records: Sequence[BatchRecord]) -> None:
        """Keep the data of steps that are in the weights already, until a checkpoint covers them."""
        self.claim()
        for record in records:
            for group in record.groups:
                self._buffer.take(group.task_id)

    def forget_covered(self, records: Sequence[BatchRecord]) -> None:
        """Forget the outcomes of steps that a checkpoint covers."""
        for record in records:
            self._forget(self.outcomes_of(record))

    def outcomes_of(self, record: BatchRecord) -> list[ScoredSample]:
        """Return the outcomes of a step's groups, as far as they are known."""
        members = [member.scored_id for group in record.groups for member in group.members]
        return [self._claimed[entry] for entry in members if entry in self._claimed]

    def examine(self, task_id: int) -> None:
        """Raise BrokerDamaged if the broker has lost scores of the oldest group, which blocks all others."""
        if self._session.diagnose_group(task_id) == "complete":
            # Its last outcome may just have come in, and may end it.
            self.claim()
            if not self._buffer.is_complete(task_id) and self._session.diagnose_group(task_id) == "complete":
                raise BrokerDamaged(f"the broker has lost scores of prompt group {task_id}")

    def describe_missing(self, active: Sequence[Slot]) -> str:
        """Describe what the oldest group lacks, and what became of others since the last step."""
        return f"{self._buffer.describe_missing(active)}{self.meter.describe()}"

    def _drop_if_useless(self, task_id: int) -> None:
        """End a complete group that would teach nothing; its slot is freed at once, out of turn."""
        outcomes = self._buffer.take(task_id)
        scored = [outcome for outcome in outcomes if outcome.trajectory_id]
        rewards = [outcome.score.reward for outcome in scored]
        broken = {outcome.sample: outcome.score.broken_version for outcome in outcomes}
        versions = [version for version in broken.values() if version >= 0]
        # A failed sample does not say of which dataset it is.
        first, size = (scored or outcomes)[0].score, outcomes[0].group_size
        settings = self._context.config.trainer.advantage_of(first.dataset)
        term = settings.filter_term or ""
        compared = [outcome.score.components.get(term, outcome.score.reward) for outcome in scored]
        # A sample's second outcome, behind these, says nothing of it.
        firsts = outcomes[:size]
        lost = [outcome for outcome in firsts if not outcome.trajectory_id]
        failed = [outcome.score.failure or "workflow" for outcome in lost if not outcome.excluded]
        self.meter.lose(failed, len(lost) - len(failed))
        signal = has_signal(compared, settings.least_std)
        if rewards and first.dataset not in self._supervised:
            if (own := scored[0].score).dataset:
                self.datasets.add(own.dataset, rewards, [outcome.score.correct for outcome in scored], own.level)
            self.meter.add(rewards, signal, compared)
        if 2 * len(versions) > size:
            self._end_group(task_id, outcomes, "not_finite", "failed", failure=describe_broken(max(versions)))
            return
        if not rewards and {*failed} == {UNREWARDED}:
            self._end_group(task_id, outcomes, UNREWARDED)
            return
        if not rewards:
            self._end_group(task_id, outcomes, "no_reward", "failed", failure=_why_failed(outcomes))
            return
        if settings.partial_groups == "drop" and len(rewards) < size:
            self._end_group(task_id, outcomes, "partial", failure=_why_failed(outcomes))
            return
        self._failures.succeeded(task_id)
        scores = [outcome.score for outcome in outcomes]
        judged = not any(one.teacher_logprobs is not None or one.dataset in self._supervised for one in scores)
        flat = settings.drops_zero_variance and not signal
        if judged and (flat or not within(compared, settings.mean_between)):
            self.filtered_at = time.monotonic()
            self._end_group(task_id, outcomes, "zero_variance" if flat else "mean_reward")
            return
        self.meter.keep()
        for outcome in outcomes:
            self._buffer.add(outcome)

    def _join(self, body: Trajectory | BadMessage | None, score: Score) -> Trajectory | BadMessage | None:
        """Return a sample with the log-probabilities of its teacher; BadMessage if they do not fit its tokens."""
        if not isinstance(body, Trajectory):
            return body
        body.trace += score.trace
        taught = body.dataset in self._taught
        given = score.teacher_logprobs if taught else None
        if taught and given is None:
            return BadMessage("its score has no log-probabilities of its teacher")
        if given is body.teacher_logprobs:
            return body
        try:
            return msgspec.structs.replace(body, teacher_logprobs=given)
        except ValueError as error:
            return BadMessage(str(error))

    def _fetch_images(self, samples: Sequence[Trajectory]) -> dict[str, bytes]:
        """Return the bytes of the images of samples by digest; BrokerDamaged if one is lost."""
        wanted = {image.digest for sample in samples for image in sample.images}
        found = self._context.broker.images.fetch(wanted) if wanted else {}
        if len(found) < len(wanted):
            self._session.read_pipeline()
            raise BrokerDamaged(f"the broker has lost images of prompt group {samples[0].task_id}")
        return found

    def _find_image_problem(self, group: Group) -> str | None:
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
        if self._router_replay is None:
            return None
        found = (self._router_replay.find_problem(one.routed_experts) for one, _ in group.samples if one.routed_experts)
        return next(filter(None, found), None)

    def _find_token_problem(self, group: Group) -> str | None:
        if self._output_tokens is None:
            return None
        for sample, _ in group.samples:
            sampled = sample.tokens.numpy()[sample.loss_mask.numpy() != 0]
            if len(wrong := np.setdiff1d(sampled, self._output_tokens)):
                return f"it has token {wrong[0]}, which model.output_tokens does not match"
        return None

    def _end_group(
        self, task_id: int, outcomes: Sequence[ScoredSample], reason: str, how: str = "dropped", failure: str = ""
    ) -> None:
        """End a group without training it, which frees its slot. failure: the reason if it counts as failed."""
        if failure:
            self._failures.failed(task_id, failure)
        self.meter.drop(reason)
        scored, rate = [outcome.scored_id for outcome in outcomes], solve_rate(outcomes)
        if self._session.drop_group(task_id, reason, scored, how, rate):
            self._context.progress.unfinished.discard(task_id)
        self._forget(outcomes)

    def _discard(self, outcomes: Sequence[ScoredSample]) -> None:
        self._session.discard_scores(outcomes)
        self._forget(outcomes)

    def _forget(self, outcomes: Sequence[ScoredSample]) -> None:
        for outcome in outcomes:
            self._claimed.pop(outcome.scored_id, None)


def solve_rate(outcomes: Sequence[ScoredSample]) -> float | None:
    """Return the share of correct samples among those that were scored, None if none was."""
    correct = [outcome.score.correct for outcome in outcomes if outcome.trajectory_id]
    return sum(correct) / len(correct) if correct else None


def _why_failed(outcomes: Sequence[ScoredSample]) -> str:
    first = next(outcome for outcome in outcomes if not outcome.trajectory_id)
    reason = first.score.reason or "no reason is known"
    return f"reward {reason}" if first.excluded else reason
