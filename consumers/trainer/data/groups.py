"""The groups of a step: the samples of a prompt with their rewards, and the journal record that names them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from schemas.messages import BatchRecord, Trajectory


@dataclass(frozen=True)
class Group:
    """A prompt's samples with rewards; a partial group has fewer than asked for. images: bytes of images by digest."""

    task_id: int
    samples: Sequence[tuple[Trajectory, float]]
    images: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """The groups of a step and its journal record. excluded: their published samples that have no reward.

    figures: metrics of how the groups came together, which their samples alone do not show. terms: of the rewards, by
    task id and sample. solve_rates: share of each group's samples that are correct, by task id.
    """

    record: BatchRecord
    groups: list[Group]
    excluded: int
    figures: Mapping[str, float] = field(default_factory=dict)
    terms: Mapping[tuple[int, int], Mapping[str, float]] = field(default_factory=dict)
    solve_rates: Mapping[int, float] = field(default_factory=dict)
