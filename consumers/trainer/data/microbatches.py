"""Micro-batches from scored groups: a plan over all ranks, and tensors where all per token is shifted together.

Position t of every ``[R, T-1]`` tensor is about predicting token t+1: its id, mask, rollout
log-probability, advantage and weight version all come from t+1. Rows are right-padded here, where they are
small; the model sees them without padding (see packing.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from consumers.trainer.algorithms.advantages import Advantage
from consumers.trainer.algorithms.aggregation import Aggregation, Totals
from consumers.trainer.data.load_balancing import Cost, shares
from schemas.errors import DataError
from schemas.messages import BatchRecord, Trajectory


@dataclass(frozen=True)
class Group:
    """The samples of one prompt, each with its reward; a partial group has fewer than were asked for."""

    task_id: int
    samples: Sequence[tuple[Trajectory, float]]


@dataclass(frozen=True)
class Batch:
    """The groups of a step and its journal record. excluded: their published samples that have no reward.

    figures: metrics of how the groups came together, which their samples alone do not show.
    """

    record: BatchRecord
    groups: list[Group]
    excluded: int
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class MicroBatch:
    """R sequences of at most T tokens, right-padded.

    tokens: int64 [R, T]. Shifted, [R, T-1]: targets int64 (0 in padding), mask bool, rollout_logprobs
    float32, advantages float32, weights float32 (of each token in the step's loss), versions int64 (-1 where
    there is none). sequence, group: int64 [R], index of the sample and of its group in the batch. lengths:
    int64 [R], tokens of the row that the model reads.
    """

    tokens: Tensor
    targets: Tensor
    mask: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    versions: Tensor
    sequence: Tensor
    group: Tensor
    lengths: Tensor

    def to(self, device: torch.device) -> MicroBatch:
        """Copy all tensors to another device."""
        return MicroBatch(**{name: getattr(self, name).to(device) for name in self.__dataclass_fields__})


class TrainSample(msgspec.Struct, frozen=True, gc=False):
    """A sample with its part in the step, as it goes to the rank that trains it.

    advantage: of each of its loss tokens. weight: of each of them in the step's loss. sequence, group: its index
    and that of its group in the batch.
    """

    trajectory: Trajectory
    advantage: float
    weight: float
    sequence: int
    group: int


@dataclass(frozen=True)
class StepPlan:
    """Samples, weights and ranks of one optimizer step. Arrays are [S], samples in the order of the groups.

    shares: indices of the samples of each data-parallel rank's micro-batches, ``[dp_rank][micro-batch][...]``.
    rewards, advantages: float64. lengths: loss tokens, int64. groups: index of each sample's group, int64. truncated:
    whether a sample ended at the token limit, bool. costs: work of each sample, float64.
    """

    samples: list[TrainSample]
    shares: list[list[list[int]]]
    totals: Totals
    rewards: npt.NDArray[np.float64]
    advantages: npt.NDArray[np.float64]
    lengths: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int64]
    truncated: npt.NDArray[np.bool_]
    costs: npt.NDArray[np.float64]

    def share(self, dp_rank: int) -> list[list[TrainSample]]:
        """Samples of each micro-batch of a rank."""
        return [[self.samples[s] for s in rows] for rows in self.shares[dp_rank]]

    def batch(self, dp_rank: int = 0) -> StepBatch:
        """Tensors of the micro-batches of a rank, with the plan that they are a part of."""
        return StepBatch.of(self.share(dp_rank), self)


@dataclass(frozen=True)
class StepBatch:
    """A rank's part of one optimizer step; plan: the whole of it, on the rank that made it."""

    micro_batches: list[MicroBatch]
    plan: StepPlan | None = None

    @classmethod
    def of(cls, micro_batches: Sequence[Sequence[TrainSample]], plan: StepPlan | None = None) -> StepBatch:
        """Make the tensors of a rank's samples, listed for each micro-batch."""
        return cls([collate(samples) for samples in micro_batches], plan)


@dataclass(frozen=True)
class StepPlanner:
    """Decides advantages, weights and ranks of the samples of a step, before any tensor is made::

        plan = planner.plan(groups)
        batch = plan.batch(dp_rank=0)        # tensors of what rank 0 trains

    max_tokens: longest completion that sampling allows. micro_batch_tokens: most tokens of a micro-batch, with padding
    unless ``packed``; a longer sequence gets one of its own. cost: work of a sample, which ranks share evenly.
    """

    advantage: Advantage
    aggregation: Aggregation
    micro_batch_tokens: int
    max_tokens: int
    dp_size: int = 1
    cost: Cost = field(default_factory=Cost)
    packed: bool = True

    def plan(self, groups: Sequence[Group]) -> StepPlan:
        """Advantages and weights over the whole step, and its samples dealt to ``dp_size`` ranks.

        A group may end up on several ranks: its rewards are compared here, within a task id, wherever its samples
        are. DataError if the advantage function returns something else than one finite number for each sample, or the
        aggregation something else than one finite weight.
        """
        samples = [(group.task_id, trajectory, reward) for group in groups for trajectory, reward in group.samples]
        trajectories = [trajectory for _, trajectory, _ in samples]
        task_ids = np.array([task_id for task_id, _, _ in samples], dtype=np.int64)
        rewards = np.array([reward for _, _, reward in samples], dtype=np.float64)
        index = np.unique(task_ids, return_inverse=True)[1].astype(np.int64)
        lengths = np.array([_loss_tokens(t) for t in trajectories], dtype=np.int64)
        totals = Totals.of(lengths, index, self.max_tokens)
        advantages = _one_each("advantages", self.advantage(rewards, index), len(samples))
        weights = _one_each("weights of the aggregation", self.aggregation(lengths, index, totals), len(samples))
        tokens = [len(t.tokens) for t in trajectories]
        costs = [self.cost.of(length, int(loss)) for length, loss in zip(tokens, lengths, strict=True)]
        return StepPlan(
            samples=[
                TrainSample(trajectory, float(advantages[s]), float(weights[s]), s, int(index[s]))
                for s, trajectory in enumerate(trajectories)
            ],
            shares=shares(costs, tokens, self.dp_size, self.micro_batch_tokens, packed=self.packed),
            totals=totals,
            rewards=rewards,
            advantages=advantages,
            lengths=lengths,
            groups=index,
            truncated=np.array([t.finish == "length" for t in trajectories], dtype=np.bool_),
            costs=np.array(costs, dtype=np.float64),
        )


def collate(samples: Sequence[TrainSample]) -> MicroBatch:
    """Tensors of one micro-batch. Without samples it is one short row without a loss token: a rank that has
    nothing to do still takes part in the collectives of the others."""
    longest = max((len(s.trajectory.tokens) for s in samples), default=0)
    shape = (max(1, len(samples)), max(2, longest))

    def filled(read: Callable[[Trajectory], npt.NDArray[np.generic]], empty: int, dtype: type) -> Tensor:
        out: npt.NDArray[Any] = np.full(shape, empty, dtype=dtype)
        for row, sample in enumerate(samples):
            out[row, : len(sample.trajectory.tokens)] = read(sample.trajectory)
        return torch.from_numpy(out)

    def spread(values: Sequence[float]) -> Tensor:
        column = torch.tensor([*values] or [0.0], dtype=torch.float32)[:, None]
        return torch.where(mask, column, 0.0)

    tokens = filled(lambda t: t.tokens.numpy(), 0, np.int64)
    mask = filled(lambda t: t.loss_mask.numpy(), 0, np.bool_)[:, 1:].contiguous()
    return MicroBatch(
        tokens=tokens,
        targets=tokens[:, 1:].contiguous(),
        mask=mask,
        rollout_logprobs=filled(lambda t: t.logprobs.numpy(), 0, np.float32)[:, 1:].contiguous(),
        advantages=spread([s.advantage for s in samples]),
        weights=spread([s.weight for s in samples]),
        versions=filled(lambda t: t.versions(), -1, np.int64)[:, 1:].contiguous(),
        sequence=torch.tensor([s.sequence for s in samples] or [-1]),
        group=torch.tensor([s.group for s in samples] or [-1]),
        # A forward pass leaves out the last token, which predicts nothing.
        lengths=torch.tensor([max(1, len(s.trajectory.tokens) - 1) for s in samples] or [1]),
    )


def _one_each(what: str, values: npt.ArrayLike, samples: int) -> npt.NDArray[np.float64]:
    """Float64 [S]; DataError unless these are one finite number for each sample."""
    found = np.asarray(values, dtype=np.float64)
    if found.shape != (samples,) or not np.isfinite(found).all():
        raise DataError(f"{what} of shape {found.shape} must be {(samples,)} finite numbers")
    return found


def _loss_tokens(trajectory: Trajectory) -> int:
    """Loss tokens that can be trained: the first token of a sequence has no prediction."""
    return int(trajectory.loss_mask.numpy()[1:].sum())
