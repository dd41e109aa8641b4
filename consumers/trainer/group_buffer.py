"""The choice of prompt groups for the next step, and whether all of them fail: state machines without I/O.

With a look-ahead window W a finished group may overtake the oldest one that is not taken yet if it was admitted less
than W admissions after it; W = 1 is strict order. A window over the list of waiting groups instead would let a slow
group be overtaken without end.
"""

from collections.abc import Iterable, Sequence

import msgspec

from broker.flow.pipeline import ScoredSample, Slot


class GroupBuffer:
    """Prompt groups that wait for a step: ``add`` outcomes, ``choose`` a complete group, ``take`` it out."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._groups: dict[int, dict[int, ScoredSample]] = {}
        self._extra: dict[int, list[ScoredSample]] = {}

    def add(self, outcome: ScoredSample) -> bool:
        """Keep an outcome; True if it completes its group. A second outcome of a sample changes nothing."""
        group = self._groups.setdefault(outcome.task_id, {})
        if outcome.sample in group:
            # It is acknowledged with its group, never trained.
            again = msgspec.structs.replace(outcome, trajectory_id=None, excluded=False)
            self._extra.setdefault(outcome.task_id, []).append(again)
            return False
        group[outcome.sample] = outcome
        return len(group) == outcome.group_size

    def is_complete(self, task_id: int) -> bool:
        """Return whether every sample of the group has an outcome."""
        group = self._groups.get(task_id)
        return group is not None and len(group) >= next(iter(group.values())).group_size

    def choose(self, active: Sequence[Slot]) -> Slot | None:
        """Return the next group to take, given the slots held, in admission order; None to wait."""
        for slot in active:
            if slot.sequence - active[0].sequence >= self._window:
                return None
            if self.is_complete(slot.task_id):
                return slot
        return None

    def take(self, task_id: int) -> list[ScoredSample]:
        """Remove a group and return its outcomes, in sample order."""
        group = self._groups.pop(task_id, {})
        return [group[sample] for sample in sorted(group)] + self._extra.pop(task_id, [])

    def waiting_ids(self) -> set[int]:
        """Return task ids of all groups that have an outcome and were not taken."""
        return set(self._groups)

    def describe_missing(self, active: Sequence[Slot]) -> str:
        """Describe in a sentence what the oldest group lacks."""
        if not active:
            return "no prompt group is in the pipeline; is the feeder running?"
        group = self._groups.get(active[0].task_id, {})
        size = next(iter(group.values())).group_size if group else None
        have = f"{len(group)} of {size} samples scored" if size else "no sample scored yet"
        return f"the oldest prompt group, {active[0].task_id}, has {have}; are generators and reward services running?"


class FailureStreak:
    """Prompt groups that failed one after another, in admission order: ``limit`` of them end the run.

    A group that succeeded or is not finished ends a streak, so that groups that fail fast beside slow ones that succeed
    are no streak. A group whose outcome is unknown is left out.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._reasons: dict[int, str] = {}
        """Why a group failed, by task id; "" for one that succeeded."""
        self._news = False

    def __len__(self) -> int:
        return len(self._reasons)

    def succeeded(self, task_id: int) -> None:
        """Record a group whose samples have their rewards, whether it will be trained or not."""
        self._reasons[task_id] = ""
        if len(self._reasons) > 8 * self._limit:
            self._forget_oldest()

    def failed(self, task_id: int, reason: str) -> None:
        """Record a group that can't be trained; it may have been recorded as a success before."""
        self._reasons[task_id] = reason
        self._news = True

    def find(self, active: Iterable[int]) -> str | None:
        """Describe a streak that is too long, if groups failed since the last call. active: task ids with a slot."""
        if not self._news:
            return None
        self._news = False
        # A group that a user requeued has failed before, and may succeed now.
        under_way = set(active)
        streak = 0
        for task_id in sorted({*self._reasons, *under_way}):
            reason = "" if task_id in under_way else self._reasons.get(task_id, "")
            streak = streak + 1 if reason else 0
            if streak >= self._limit:
                return f"{streak} prompt groups in a row failed, the last: {reason}"
        self._forget_oldest()
        return None

    def _forget_oldest(self) -> None:
        for task_id in sorted(self._reasons)[: -4 * self._limit]:
            del self._reasons[task_id]
