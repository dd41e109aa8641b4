"""The fragments of a step as its batch: they are not dealt to ranks, for there is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from consumers.trainer.data.groups import Group
from schemas.messages import Trajectory


@dataclass(frozen=True)
class FragmentPlan:
    """A step's fragments with their rewards. groups: of each sample, its group's number. images: None, as for text."""

    samples: Sequence[tuple[Trajectory, float]] = ()
    groups: Sequence[int] = ()
    images: None = None

    def plan(self, groups: Sequence[Group]) -> FragmentPlan:
        pairs = [(sample, number) for number, group in enumerate(groups) for sample in group.samples]
        return FragmentPlan([sample for sample, _ in pairs], [number for _, number in pairs])

    def batch(self, dp_rank: int) -> FragmentPlan:
        return self

    def ages(self, version: int) -> dict[int, int]:
        """Return the number of transitions by age, in versions."""
        found: dict[int, int] = {}
        for trajectory, _ in self.samples:
            envs = trajectory.fragment.envs if trajectory.fragment is not None else 1
            for span in trajectory.spans:
                age = version - span.version
                found[age] = found.get(age, 0) + (span.end - span.start) * envs
        return dict(sorted(found.items()))
