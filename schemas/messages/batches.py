"""Batches of training samples: by reference in the broker's journal, and whole in files of the run's folder."""

import msgspec

from schemas.codec import Message
from schemas.messages.trajectories import Trajectory


class Member(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sample of a journaled group: its entries in the two streams; ``trajectory_id`` is empty if it was excluded."""

    sample: int
    scored_id: bytes
    trajectory_id: bytes


class GroupRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A prompt group of a journaled batch, members in sample order."""

    task_id: int
    members: list[Member]


class BatchRecord(Message, kw_only=True, tag="batch"):
    """The batch of an optimizer step, journaled before the step, which trains ``version`` and makes ``new_version``."""

    step: int
    version: int
    new_version: int
    groups: list[GroupRef]


class RecordedGroup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A prompt group in the order it was trained in, with a reward for each sample. images: their bytes by digest."""

    task_id: int
    samples: list[Trajectory]
    rewards: list[float]
    images: dict[str, bytes] = {}

    def __post_init__(self) -> None:
        if len(self.samples) != len(self.rewards):
            raise ValueError(
                f"prompt group {self.task_id} has {len(self.samples)} samples, {len(self.rewards)} rewards"
            )


class StepRecord(Message, kw_only=True, tag="step_record"):
    """Record of an optimizer step: ``step`` steps were done before it, ``version`` names the weights before it.

    leader_term: of the trainer. world, parallel, threads, torch: ranks, how they shared the
    model (trainer.parallel), CPU threads of each, and PyTorch's version, on which the last bits of a sum depend. lr,
    steps: peak learning rate and steps of the run at that step; 0: the configured value.
    """

    step: int
    version: int
    leader_term: int
    world: int
    parallel: dict[str, int]
    threads: int
    torch: str
    groups: list[RecordedGroup]
    lr: float = 0.0
    steps: int = 0
