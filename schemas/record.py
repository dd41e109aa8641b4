"""What a step was trained on, whole: enough to train it again without a broker."""

from __future__ import annotations

import msgspec

from schemas.codec import Message
from schemas.messages import Trajectory


class RecordedGroup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One prompt group in the order it was trained in; a reward for each sample."""

    task_id: int
    samples: list[Trajectory]
    rewards: list[float]

    def __post_init__(self) -> None:
        if len(self.samples) != len(self.rewards):
            raise ValueError(
                f"prompt group {self.task_id} has {len(self.samples)} samples, {len(self.rewards)} rewards"
            )


class StepRecord(Message, kw_only=True, tag="step_record"):
    """One optimizer step: ``step`` steps were done before it, ``version`` names the weights before it.

    epoch: number of the trainer incarnation that trained it. world, threads, torch: ranks, CPU threads of each, and
    PyTorch's version, on which the last bits of a sum depend.
    """

    step: int
    version: int
    epoch: int
    world: int
    threads: int
    torch: str
    groups: list[RecordedGroup]
