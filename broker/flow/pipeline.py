"""The pipeline as its trainer sees it: slots, scored samples, and a snapshot."""

from dataclasses import dataclass, field

import msgspec

from broker.flow.ledger import ended_untrained
from broker.flow.run_control import ControlState
from schemas.messages import Score


class ScoredSample(msgspec.Struct, frozen=True, gc=False):
    """The outcome of a sample as the trainer reads it.

    scored_id: its entry in the scores, followed by ``/SAMPLE`` if the entry holds several samples of the group.
    trajectory_id: None if the sample failed. excluded: whether it was published and its reward failed.
    """

    scored_id: bytes
    task_id: int
    sample: int
    group_size: int
    trajectory_id: bytes | None
    score: Score
    excluded: bool = False


@dataclass(frozen=True)
class Slot:
    """A group in the pipeline; ``sequence`` counts admissions."""

    task_id: int
    sequence: int


@dataclass(frozen=True)
class PipelineSnapshot:
    """The pipeline at one moment, as its trainer needs it.

    cursor: every task id below it was admitted once, or skipped. readmit: ids below it that are to be admitted again.
    batch: prompt groups in the next step (B). staleness: bound in versions.
    """

    step: int
    cursor: int
    slots: list[Slot]
    readmit: list[int]
    counts: dict[str, int]
    batch: int
    staleness: int
    settings: dict[str, float]
    paused: bool
    control: ControlState = field(default_factory=ControlState)

    @property
    def balanced(self) -> bool:
        """Whether the ledger's invariant holds."""
        ended = self.counts.get("trained", 0) + ended_untrained(self.counts)
        admitted = self.counts.get("admitted", 0)
        skipped = self.counts.get("skipped", 0)
        return admitted == len(self.slots) + ended == self.cursor - len(self.readmit) - skipped

    @property
    def unfinished(self) -> set[int]:
        """Task ids below the cursor that have not ended."""
        return {slot.task_id for slot in self.slots} | set(self.readmit)
