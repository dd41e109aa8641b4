"""The pipeline as its trainer sees it: slots, scored samples, and a snapshot."""

from dataclasses import dataclass, field

import msgspec

from broker.flow.ledger import LedgerState
from schemas.messages import Score


class ScoredSample(msgspec.Struct, frozen=True, gc=False):
    """The outcome of a sample as the trainer reads it.

    scored_id: its entry in the scores, followed by ``/SAMPLE`` if the entry holds several samples of the group.
    trajectory_id: None if the sample failed. excluded: whether it was published and its reward failed.
    A sample of -1 is the end of a group that no generator could read or survive: its earlier outcomes count no more.
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
class PipelineSnapshot(LedgerState):
    """The ledger at one moment, with the groups in the pipeline, as the trainer needs it.

    waiting: task ids below the cursor that are to be admitted again. counts: the ledger's counters, by name.
    """

    slots: list[Slot] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def unfinished(self) -> set[int]:
        """Task ids below the cursor that have not ended."""
        return {slot.task_id for slot in self.slots} | set(self.waiting)
