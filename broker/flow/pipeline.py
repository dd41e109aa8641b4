"""The pipeline as its trainer sees it, and what trainer and broker tell each other when a trainer takes a run over."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from broker.flow.ledger import ended_untrained
from broker.flow.run_control import ControlState, Mode
from schemas.messages import Score


class ScoredSample(msgspec.Struct, frozen=True, gc=False):
    """One sample's outcome as the trainer reads it.

    trajectory_id is None when the sample failed; ``excluded`` when it had been published and its reward failed.
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


FIRST_LINEAGE = "start"


@dataclass(frozen=True)
class PipelineSnapshot:
    """The pipeline at one moment, as its trainer needs it.

    cursor: every task id below it was admitted once. redo: ids below it that are to be admitted again.
    batch: prompt groups in the next step (B). staleness: bound in versions.
    """

    step: int
    cursor: int
    slots: list[Slot]
    redo: list[int]
    counts: dict[str, int]
    batch: int
    staleness: int
    settings: dict[str, int]
    paused: bool
    orders: ControlState = field(default_factory=ControlState)

    @property
    def balanced(self) -> bool:
        """The ledger's invariant."""
        ended = self.counts.get("trained", 0) + ended_untrained(self.counts)
        admitted = self.counts.get("admitted", 0)
        return admitted == len(self.slots) + ended == self.cursor - len(self.redo)

    @property
    def unfinished(self) -> set[int]:
        """Task ids below the cursor that have not ended."""
        return {slot.task_id for slot in self.slots} | set(self.redo)


@dataclass(frozen=True)
class TakeoverRequest:
    """What a trainer knows when it takes the run over: from its checkpoint, or from its own life.

    batch, staleness, window, steps, every (most steps that no checkpoint covers): the configuration's; settings: live
    changes of them. fresh: there was no trainer before it; the defaults are what such a one knows.
    leader_term_floor: highest term it has heard of. lineage: names an unbroken life of the broker's data.
    version_if_lost: version of its weights if the broker lost the versions published after ``version``.
    pause, with its number, who asked for it and when: the last order of that kind that it has seen.
    trained: prompt groups trained. saved: the step up to which its checkpoints go.
    """

    batch: int
    staleness: int
    window: int
    steps: int
    every: int
    fresh: bool = True
    leader_term_floor: int = 0
    lineage: str = FIRST_LINEAGE
    step: int = 0
    saved: int = 0
    version: int = 0
    version_if_lost: int = 0
    cursor: int = 0
    unfinished: list[int] = field(default_factory=list)
    trained: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    settings: dict[str, int] = field(default_factory=dict)
    pause: Mode = "none"
    pause_id: int = 0
    pause_by: str = ""
    pause_since: int = 0
    started: str | None = None


@dataclass(frozen=True)
class Takeover:
    """What the broker says after it. lost: it had lost something, and was mended from what the trainer knew.

    surplus: groups that its counts say ended more often than they were admitted: an error, which the ledger shows
    as a negative ``dropped:counted_twice``.
    """

    leader_term: str
    step: int
    version: int
    lineage: str
    started: str
    lost: bool
    surplus: int = 0
