"""From scored groups to micro-batches: padded tensors where everything per token is shifted together.

Position t of every ``[R, T-1]`` tensor is about predicting token t+1: its id, mask, rollout
log-probability, advantage and weight version all come from t+1. Rows are right-padded, which causal
attention never looks at, and sorted by length so that little is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from consumers.trainer.advantages import Advantage
from consumers.trainer.aggregation import Aggregation, Totals
from schemas.errors import DataError
from schemas.messages import Trajectory


@dataclass(frozen=True)
class Group:
    """The samples of one prompt, each with its reward; a partial group has fewer than were asked for."""

    task_id: int
    samples: Sequence[tuple[Trajectory, float]]


@dataclass(frozen=True)
class MicroBatch:
    """R sequences of at most T tokens, right-padded.

    tokens: int64 [R, T]. Shifted, [R, T-1]: targets int64 (0 in padding), mask bool, rollout_logprobs
    float32, advantages float32, weights float32 (of each token in the step's loss), versions int64 (-1 where
    there is none). sequence, group: int64 [R], index of the sample and of its group in the batch.
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

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        return MicroBatch(**{name: getattr(self, name).to(device) for name in self.__dataclass_fields__})


@dataclass(frozen=True)
class StepBatch:
    """What one optimizer step trains on, on this rank. Arrays are [S], samples in the order of the groups.

    totals: counts of the whole step, over all ranks.
    """

    micro_batches: list[MicroBatch]
    totals: Totals
    rewards: npt.NDArray[np.float64]
    advantages: npt.NDArray[np.float64]
    lengths: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int64]
    truncated: npt.NDArray[np.bool_]
    padded_tokens: int


def count(groups: Sequence[Group], max_tokens: int) -> Totals:
    """Totals of these groups alone; ranks add theirs up before ``assemble``."""
    lengths = [_loss_tokens(t) for group in groups for t, _ in group.samples]
    return Totals(tokens=sum(lengths), sequences=len(lengths), groups=len(groups), max_tokens=max_tokens)


def assemble(
    groups: Sequence[Group],
    *,
    advantage: Advantage,
    aggregation: Aggregation,
    micro_batch_tokens: int,
    max_tokens: int,
    totals: Totals | None = None,
) -> StepBatch:
    """Build the micro-batches of one step.

    Each holds at most ``micro_batch_tokens`` tokens with padding; a longer sequence gets one of its own.
    Rewards are compared within a task id, wherever its samples are. DataError if the advantage function
    returns something else than one finite number for each sample.
    """
    samples = [(group.task_id, trajectory, reward) for group in groups for trajectory, reward in group.samples]
    trajectories = [trajectory for _, trajectory, _ in samples]
    task_ids = np.array([task_id for task_id, _, _ in samples], dtype=np.int64)
    rewards = np.array([reward for _, _, reward in samples], dtype=np.float64)
    index = np.unique(task_ids, return_inverse=True)[1].astype(np.int64)
    lengths = np.array([_loss_tokens(t) for t in trajectories], dtype=np.int64)
    totals = totals or count(groups, max_tokens)

    advantages = np.asarray(advantage(rewards, index), dtype=np.float64)
    if advantages.shape != rewards.shape or not np.isfinite(advantages).all():
        raise DataError(f"advantages of shape {advantages.shape} must be {rewards.shape} finite numbers")
    weights = aggregation(lengths, index, totals)

    micro_batches = [
        _pad([trajectories[s] for s in rows], advantages[rows], weights[rows], np.array(rows), index[rows])
        for rows in _plan([len(t.tokens) for t in trajectories], micro_batch_tokens)
    ]
    return StepBatch(
        micro_batches=micro_batches,
        totals=totals,
        rewards=rewards,
        advantages=advantages,
        lengths=lengths,
        groups=index,
        truncated=np.array([t.finish == "length" for t in trajectories], dtype=np.bool_),
        padded_tokens=sum(m.tokens.numel() for m in micro_batches),
    )


def empty_like(micro: MicroBatch | None) -> MicroBatch:
    """A micro-batch of one short row without a loss token, for a rank that has less to do than others."""
    tokens = torch.zeros(1, 2, dtype=torch.int64) if micro is None else micro.tokens[:1]
    shape = (1, tokens.shape[1] - 1)
    return MicroBatch(
        tokens=tokens,
        targets=torch.zeros(shape, dtype=torch.int64),
        mask=torch.zeros(shape, dtype=torch.bool),
        rollout_logprobs=torch.zeros(shape),
        advantages=torch.zeros(shape),
        weights=torch.zeros(shape),
        versions=torch.full(shape, -1, dtype=torch.int64),
        sequence=torch.full((1,), -1, dtype=torch.int64),
        group=torch.full((1,), -1, dtype=torch.int64),
    )


def _loss_tokens(trajectory: Trajectory) -> int:
    """Loss tokens that can be trained: the first token of a sequence has no prediction."""
    return int(trajectory.loss_mask.numpy()[1:].sum())


def _plan(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Rows of each micro-batch: shortest first, rows times longest within the budget."""
    rows: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda s: (lengths[s], s)):
        if rows and (len(rows) + 1) * lengths[row] > budget:
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows


def _pad(
    trajectories: Sequence[Trajectory],
    advantages: npt.NDArray[np.float64],
    weights: npt.NDArray[np.float64],
    sequence: npt.NDArray[np.int64],
    group: npt.NDArray[np.int64],
) -> MicroBatch:
    longest = max(2, max(len(t.tokens) for t in trajectories))

    def filled(read: Callable[[Trajectory], npt.NDArray[np.generic]], empty: int, dtype: type) -> Tensor:
        out = np.full((len(trajectories), longest), empty, dtype=dtype)
        for row, trajectory in enumerate(trajectories):
            out[row, : len(trajectory.tokens)] = read(trajectory)
        return torch.from_numpy(out)

    tokens = filled(lambda t: t.tokens.numpy(), 0, np.int64)
    mask = filled(lambda t: t.loss_mask.numpy(), 0, np.bool_)[:, 1:]
    per_row = {
        "advantages": torch.from_numpy(advantages.astype(np.float32)),
        "weights": torch.from_numpy(weights.astype(np.float32)),
    }
    spread = {name: torch.where(mask, value[:, None], 0.0) for name, value in per_row.items()}
    return MicroBatch(
        tokens=tokens,
        targets=tokens[:, 1:].contiguous(),
        mask=mask.contiguous(),
        rollout_logprobs=filled(lambda t: t.logprobs.numpy(), 0, np.float32)[:, 1:].contiguous(),
        versions=filled(lambda t: t.versions(), -1, np.int64)[:, 1:].contiguous(),
        sequence=torch.from_numpy(sequence.astype(np.int64)),
        group=torch.from_numpy(group),
        **spread,
    )
