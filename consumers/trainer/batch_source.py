"""Which groups the next step trains on: a pure state machine over outcomes and slots.

Groups are taken in admission order. With a look-ahead window W a finished group may overtake
the oldest one that is not taken yet if it was admitted less than W admissions after it;
W = 1 is strict order. A window over the list of waiting groups instead would let a slow group
be overtaken without end.

Batches from the broker: assembled in admission order, checked for staleness, journaled before they are trained.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import structlog

from broker.flow.pipeline import ScoredSample, Slot
from broker.flow.progress import Progress
from broker.flow.trainer_session import TrainerSession
from consumers.trainer.algorithms.advantages import has_signal, within
from consumers.trainer.data.microbatches import Group
from consumers.trainer.pause import PauseFollower
from schemas.config import TidemillConfig
from schemas.errors import BrokerDamaged, InfraError
from schemas.lifecycle import StopFlag
from schemas.messages import BatchRecord, GroupRef, Member


class GroupBuffer:
    """``add`` outcomes as they come, ``choose`` complete groups, ``take`` one for good."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._groups: dict[int, dict[int, ScoredSample]] = {}
        self._extra: dict[int, list[ScoredSample]] = {}

    def add(self, outcome: ScoredSample) -> bool:
        """Count an outcome; True when it completes its group. A sample's second outcome changes nothing."""
        group = self._groups.setdefault(outcome.task_id, {})
        if outcome.sample in group:
            # It is acknowledged with its group, never trained.
            again = msgspec.structs.replace(outcome, trajectory_id=None, excluded=False)
            self._extra.setdefault(outcome.task_id, []).append(again)
            return False
        group[outcome.sample] = outcome
        return len(group) == outcome.group_size

    def complete(self, task_id: int) -> bool:
        """Whether every sample of the group has an outcome."""
        group = self._groups.get(task_id)
        return group is not None and len(group) >= next(iter(group.values())).group_size

    def choose(self, active: Sequence[Slot]) -> Slot | None:
        """The next group to take, given the slots held, in admission order; None to wait."""
        for slot in active:
            if slot.sequence - active[0].sequence >= self._window:
                return None
            if self.complete(slot.task_id):
                return slot
        return None

    def take(self, task_id: int) -> list[ScoredSample]:
        """Hand a group over, in sample order."""
        group = self._groups.pop(task_id, {})
        return [group[sample] for sample in sorted(group)] + self._extra.pop(task_id, [])

    def waiting(self) -> set[int]:
        """Task ids of all groups that have an outcome and were not taken."""
        return set(self._groups)

    def missing(self, active: Sequence[Slot]) -> str:
        """What the oldest group lacks, for people."""
        if not active:
            return "no prompt group is in the pipeline; is the feeder running?"
        group = self._groups.get(active[0].task_id, {})
        size = next(iter(group.values())).group_size if group else None
        have = f"{len(group)} of {size} samples scored" if size else "no sample scored yet"
        return f"the oldest prompt group, {active[0].task_id}, has {have}; are generators and reward services running?"


CLAIM = 2000
"""Outcomes claimed at once."""

QUIET_S = 2.0
"""After so long without an outcome it is looked at whether any can come."""

log = structlog.get_logger()


@dataclass(frozen=True)
class Batch:
    """What one step trains on, and its journal record. excluded: published samples of it that have no reward."""

    record: BatchRecord
    groups: list[Group]
    excluded: int


class BatchSource:
    """``next`` waits for the groups of a step; ``replay`` gives those of a journaled one again.

    quiet: called while nothing comes in, to look for what the others may wait for.
    heed: what people ask for is followed between steps.
    """

    def __init__(
        self,
        config: TidemillConfig,
        training: TrainerSession,
        progress: Progress,
        quiet: Callable[[], None],
        heed: PauseFollower,
    ) -> None:
        self._config = config
        self._training = training
        self._progress = progress
        self._quiet = quiet
        self._heed = heed
        self._assembly = GroupBuffer(config.flow.window)
        self._claimed: dict[bytes, ScoredSample] = {}
        self._ended: Counter[str] = Counter()
        self._news = time.monotonic()

    def next(self, makes: int, stop: StopFlag) -> Batch | None:
        """The next step's batch; None when asked to stop. InfraError after the deadline.

        makes: the version that the step will make.
        """
        step, version = self._progress.step, self._progress.version
        groups: list[tuple[Group, list[ScoredSample]]] = []
        taken: set[int] = set()
        self._ended.clear()
        deadline = time.monotonic() + self._config.trainer.batch_timeout_s
        while True:
            self._claim()
            look = self._training.look()
            self._progress.update(look)
            if self._heed.follow(look.control):
                if stop:
                    return None
                self._heed.wait(look.control.pause_id)
                deadline = time.monotonic() + self._config.trainer.batch_timeout_s
                continue
            self._discard_ended({slot.task_id for slot in look.slots} | taken)
            active = [slot for slot in look.slots if slot.task_id not in taken]
            chosen: list[int] = []
            while len(groups) + len(chosen) < look.batch:
                slot = self._assembly.choose(active)
                if slot is None:
                    break
                active.remove(slot)
                chosen.append(slot.task_id)
            for group, outcomes in self._usable(chosen, version, look.staleness):
                taken.add(group.task_id)
                groups.append((group, outcomes))
            if len(groups) >= look.batch:
                break
            if chosen:
                continue
            if stop:
                return None
            if not active and self._heed.follow(look.control, drained=True):
                self._heed.wait(look.control.pause_id)
                deadline = time.monotonic() + self._config.trainer.batch_timeout_s
                continue
            if time.monotonic() > deadline:
                raise InfraError(
                    f"step {step} waited {self._config.trainer.batch_timeout_s:.0f} s for"
                    f" {look.batch} prompt groups and has {len(groups)}:"
                    f" {self._assembly.missing(active)}{self._ends()}"
                )
            if active and time.monotonic() - self._news > QUIET_S:
                self._examine(active[0].task_id)
                self._quiet()
            self._training.wait()
        references = [_reference(outcomes) for _, outcomes in groups]
        record = BatchRecord(step=step, version=version, makes=makes, groups=references)
        self._training.journal(record)
        return self._batch(record, [group for group, _ in groups])

    def replay(self, record: BatchRecord) -> Batch:
        """The same data as before; InfraError when the broker has lost some of it."""
        self._claim()
        groups = []
        for reference in record.groups:
            ids = [member.trajectory_id for member in reference.members if member.trajectory_id]
            scores = [self._claimed.get(member.scored_id) for member in reference.members if member.trajectory_id]
            bodies = self._training.fetch(ids)
            if None in bodies or None in scores:
                raise BrokerDamaged(f"the broker has lost a part of journaled step {record.step}")
            self._assembly.take(reference.task_id)
            samples = [(body, score.score.reward) for body, score in zip(bodies, scores, strict=True) if body and score]
            groups.append(Group(reference.task_id, samples))
        return self._batch(record, groups)

    def hold(self, records: Sequence[BatchRecord]) -> None:
        """These steps are in the weights already; their data stays until a checkpoint covers it."""
        self._claim()
        for record in records:
            for group in record.groups:
                self._assembly.take(group.task_id)

    def _batch(self, record: BatchRecord, groups: list[Group]) -> Batch:
        members = [member.scored_id for group in record.groups for member in group.members]
        excluded = sum(self._claimed[entry].excluded for entry in members if entry in self._claimed)
        return Batch(record, groups, excluded)

    def committed(self, records: Sequence[BatchRecord]) -> None:
        """Forget what a checkpoint covers."""
        for record in records:
            for group in record.groups:
                for member in group.members:
                    self._claimed.pop(member.scored_id, None)

    def _examine(self, task_id: int) -> None:
        """The oldest group holds all others up: nothing may be missing of what it waits for."""
        if self._training.examine(task_id) == "complete":
            # Its last outcome may just have come in.
            self._claim()
            if not self._assembly.complete(task_id):
                raise BrokerDamaged(f"the broker has lost scores of prompt group {task_id}")
        self._news = time.monotonic()

    def _discard_ended(self, active: set[int]) -> None:
        """Outcomes of groups that hold no slot any more, or of none at all, are in nobody's way."""
        for task_id in self._assembly.waiting() - active:
            outcomes = self._assembly.take(task_id)
            self._training.discard(outcomes)
            for outcome in outcomes:
                self._claimed.pop(outcome.scored_id, None)

    def _claim(self) -> None:
        while True:
            outcomes = self._training.claim(CLAIM)
            if outcomes:
                self._news = time.monotonic()
            for outcome in outcomes:
                self._claimed[outcome.scored_id] = outcome
                if self._assembly.add(outcome):
                    self._drop_if_useless(outcome.task_id)
            if len(outcomes) < CLAIM:
                return

    def _drop_if_useless(self, task_id: int) -> None:
        """A group that would teach nothing gives its slot back at once, out of turn."""
        outcomes = self._assembly.take(task_id)
        rewards = [outcome.score.reward for outcome in outcomes if outcome.trajectory_id]
        settings = self._config.trainer.advantage
        if not rewards:
            self._end(task_id, outcomes, "no_reward", "failed")
        elif settings.partial_groups == "drop" and len(rewards) < outcomes[0].group_size:
            self._end(task_id, outcomes, "partial")
        elif settings.drops_zero_variance and not has_signal(rewards, settings.least_std):
            self._end(task_id, outcomes, "zero_variance")
        elif not within(rewards, settings.mean_between):
            self._end(task_id, outcomes, "mean_reward")
        else:
            for outcome in outcomes:
                self._assembly.add(outcome)

    def _usable(
        self, task_ids: Sequence[int], version: int, staleness: int
    ) -> Iterator[tuple[Group, list[ScoredSample]]]:
        """These groups with their trajectories, without those that are dropped for their age."""
        taken = [self._assembly.take(task_id) for task_id in task_ids]
        scored = [[outcome for outcome in outcomes if outcome.trajectory_id] for outcomes in taken]
        bodies = iter(self._training.fetch([outcome.trajectory_id or b"" for group in scored for outcome in group]))
        for task_id, outcomes, members in zip(task_ids, taken, scored, strict=True):
            samples = [(body, outcome.score.reward) for outcome in members if (body := next(bodies)) is not None]
            if len(samples) < len(members):
                # Perhaps it only went back in time since the last look, which is mended with less.
                self._training.look()
                raise BrokerDamaged(f"the broker has lost samples of prompt group {task_id}")
            oldest = min(body.oldest_version for body, _ in samples)
            if version - oldest > staleness:
                log.warning("group is too old", task_id=task_id, oldest=oldest, version=version)
                self._end(task_id, outcomes, "stale")
                continue
            yield Group(task_id, samples), outcomes

    def _ends(self) -> str:
        """Groups that were given up since the last step, for people."""
        if not self._ended:
            return ""
        return "; given up meanwhile: " + ", ".join(f"{count} {reason}" for reason, count in self._ended.items())

    def _end(self, task_id: int, outcomes: Sequence[ScoredSample], reason: str, how: str = "dropped") -> None:
        self._ended[reason] += 1
        if self._training.drop(task_id, reason, [outcome.scored_id for outcome in outcomes], how):
            self._progress.unfinished.discard(task_id)
        for outcome in outcomes:
            self._claimed.pop(outcome.scored_id, None)


def _reference(outcomes: Sequence[ScoredSample]) -> GroupRef:
    members = [Member(outcome.sample, outcome.scored_id, outcome.trajectory_id or b"") for outcome in outcomes]
    return GroupRef(outcomes[0].task_id, members)
