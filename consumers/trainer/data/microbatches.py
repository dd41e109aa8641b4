"""Micro-batches from scored groups: a plan over all ranks, and tensors where all per token is shifted together.

Position t of every ``[R, T-1]`` tensor is about predicting token t+1: its id, mask, rollout
log-probability, advantage and weight version all come from t+1. Rows are right-padded here, where they are
small; the model sees them without padding (see packing.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from consumers.trainer.algorithms.aggregation import Aggregation, Totals
from consumers.trainer.data.credit import AnyAdvantage, Samples, give_credit, one_each
from consumers.trainer.data.load_balancing import Cost, shares, shares_of_families, work
from consumers.trainer.data.patches import ImageBatch, ImageFiles
from consumers.trainer.data.row_families import count_shared, find_families
from consumers.trainer.data.rows import TrainRow, cut_rows, loss_tokens
from schemas.errors import DataError
from schemas.images import ImageSettings
from schemas.messages import BatchRecord, Trajectory

TRUNCATED = frozenset(("length", "calls", "deadline"))
"""Ends of a sample that are a limit's and not its own."""


@dataclass(frozen=True)
class Group:
    """The samples of one prompt, each with its reward; a partial group has fewer than were asked for.

    images: bytes of their images by digest.
    """

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


@dataclass(frozen=True)
class MicroBatch:
    """R rows of at most T tokens, right-padded.

    tokens: int64 [R, T]. Shifted, [R, T-1]: targets int64 (0 in padding), mask bool, rollout_logprobs
    float32, advantages float32, weights float32 (of each token in the step's loss), versions int64 (-1 where
    there is none). sequence, sample, group: int64 [R], index of the row, of its sample and of its group in the batch;
    a sample's rows may be in several micro-batches. lengths: int64 [R], tokens of the row that the model reads.

    With an advantage of tokens there are, until it is computed, rewards in the place of advantages. images: those that
    tokens of the rows stand for, None without any. temperatures: with which each row was sampled; no tensor, whose type
    FSDP2 would lower with that of the model's inputs. routed_experts: int16 [R, T, L, k], the experts that each token
    was sent to at rollout in L layers, -1 where nobody noted it; None if of no row.
    """

    tokens: Tensor
    targets: Tensor
    mask: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    versions: Tensor
    sequence: Tensor
    sample: Tensor
    group: Tensor
    lengths: Tensor
    images: ImageBatch | None = None
    temperatures: Sequence[float] = (1.0,)
    routed_experts: Tensor | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """Copy all tensors to another device."""
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        moved = {name: value.to(device) for name, value in values.items() if hasattr(value, "to")}
        return MicroBatch(**{**values, **moved})


@dataclass(frozen=True)
class StepPlan:
    """Rows, weights and ranks of one optimizer step. Arrays are [S], samples in the order of the groups.

    shares: indices of the rows of each data-parallel rank's micro-batches, ``[dp_rank][micro-batch][...]``.
    rewards, advantages: float64. lengths: loss tokens over all rows of a sample, int64. groups: index of each sample's
    group, int64. truncated: whether a sample ended at a limit, of tokens, calls or time, bool. loads: work of each
    rank, float64 [dp_size]. shared_fraction: of the tokens of all rows, those that are computed with another row.
    images: their files, and how they are cut; None for a model of text.
    """

    rows: list[TrainRow]
    shares: list[list[list[int]]]
    totals: Totals
    rewards: npt.NDArray[np.float64]
    advantages: npt.NDArray[np.float64]
    lengths: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int64]
    truncated: npt.NDArray[np.bool_]
    loads: npt.NDArray[np.float64]
    shared_fraction: float
    images: ImageFiles | None = None

    def share(self, dp_rank: int) -> list[list[TrainRow]]:
        """Rows of each micro-batch of a rank."""
        return [[self.rows[r] for r in rows] for rows in self.shares[dp_rank]]

    def files(self, dp_rank: int) -> dict[str, bytes]:
        """Bytes of the images of a rank's rows by digest."""
        if self.images is None:
            return {}
        wanted = {image.digest for rows in self.share(dp_rank) for row in rows for image in row.images}
        return {digest: body for digest, body in self.images.files.items() if digest in wanted}

    def batch(self, dp_rank: int = 0) -> StepBatch:
        """Tensors of the micro-batches of a rank, with the plan that they are a part of."""
        return StepBatch.of(self.share(dp_rank), self, self.images)


@dataclass(frozen=True)
class StepBatch:
    """A rank's part of one optimizer step; plan: the whole of it, on the rank that made it."""

    micro_batches: list[MicroBatch]
    plan: StepPlan | None = None

    @classmethod
    def of(
        cls,
        micro_batches: Sequence[Sequence[TrainRow]],
        plan: StepPlan | None = None,
        images: ImageFiles | None = None,
    ) -> StepBatch:
        """Make the tensors of a rank's rows, listed for each micro-batch."""
        return cls([collate(rows, images) for rows in micro_batches], plan)


@dataclass(frozen=True)
class StepPlanner:
    """Decides advantages, weights and ranks of the rows of a step, before any tensor is made::

        plan = planner.plan(groups)
        batch = plan.batch(dp_rank=0)        # tensors of what rank 0 trains

    max_tokens: longest completion that sampling allows. micro_batch_tokens: most tokens of a micro-batch, with padding
    unless ``packed``; a longer row gets one of its own. cost: work of a row, which ranks share evenly. by_name: see
    data/credit.py. mask_truncated: samples that ended at a limit have weight 0 and count in no mean of the loss; their
    rewards are compared with the others' all the same. share_prefixes: whether the policy computes once what rows of a
    micro-batch begin with, so that rows which begin alike belong together. images: how the model wants images, None for
    one of text.
    """

    advantage: AnyAdvantage
    aggregation: Aggregation
    micro_batch_tokens: int
    max_tokens: int
    dp_size: int = 1
    cost: Cost = field(default_factory=Cost)
    packed: bool = True
    by_name: bool = False
    mask_truncated: bool = False
    share_prefixes: bool = False
    images: ImageSettings | None = None

    def files(self, bodies: Mapping[str, bytes]) -> ImageFiles | None:
        """These images with the way in which the model wants them; None for a model of text."""
        return None if self.images is None else ImageFiles(self.images, bodies)

    def plan(self, groups: Sequence[Group]) -> StepPlan:
        """Advantages and weights over the whole step, and its rows dealt to ``dp_size`` ranks.

        A group may end up on several ranks, and so may a sample: rewards are compared here, within a task id, and
        a sample's weight is by its loss tokens in all rows, wherever they are. DataError if the advantage function
        returns something else than one finite number for each sample, or the aggregation something else than one
        finite weight.
        """
        samples = [(group.task_id, trajectory, reward) for group in groups for trajectory, reward in group.samples]
        trajectories = [trajectory for _, trajectory, _ in samples]
        task_ids = np.array([task_id for task_id, _, _ in samples], dtype=np.int64)
        rewards = np.array([reward for _, _, reward in samples], dtype=np.float64)
        index = np.unique(task_ids, return_inverse=True)[1].astype(np.int64)
        rows = [row for s, trajectory in enumerate(trajectories) for row in cut_rows(trajectory, s)]
        lengths = loss_tokens(rows, len(samples))
        truncated = np.array([t.finish in TRUNCATED for t in trajectories], dtype=np.bool_)
        masked = truncated & self.mask_truncated
        counted = np.where(masked, 0, lengths)
        totals = Totals.of(counted, index, self.max_tokens)
        credit = give_credit(self.advantage, Samples(trajectories, rewards, index, rows), self.by_name)
        weights = one_each("weights of the aggregation", self.aggregation(counted, index, totals), len(samples))
        weights = np.where(masked, 0.0, weights)
        tokens = [len(row.tokens) for row in rows]
        costs = [self.cost.of(length, row.loss_tokens) for length, row in zip(tokens, rows, strict=True)]
        of_rows = [int(index[row.sample]) for row in rows]
        most = self.micro_batch_tokens
        families = find_families([row.tokens.numpy() for row in rows], of_rows, most) if self.share_prefixes else []
        dealt = (
            shares_of_families(costs, tokens, self.dp_size, most, families, self.cost.token)
            if families
            else shares(costs, tokens, self.dp_size, most, packed=self.packed)
        )
        shared = sum(count_shared(families, [rows for micro_batches in dealt for rows in micro_batches]))
        loads = np.array([sum(each) for each in work(dealt, costs, families, self.cost.token)], dtype=np.float64)
        return StepPlan(
            rows=[
                TrainRow(
                    tokens=row.tokens,
                    loss_mask=row.loss_mask,
                    logprobs=row.logprobs,
                    spans=row.spans,
                    advantage=advantage,
                    weight=float(weights[row.sample]),
                    sequence=r,
                    sample=row.sample,
                    group=of_rows[r],
                    images=list(row.images),
                    temperature=trajectories[row.sample].temperature,
                    routed_experts=row.routed_experts,
                )
                for r, (row, advantage) in enumerate(zip(rows, credit.rows, strict=True))
            ],
            shares=dealt,
            totals=totals,
            rewards=rewards,
            advantages=credit.samples,
            lengths=lengths,
            groups=index,
            truncated=truncated,
            loads=loads,
            shared_fraction=shared / max(1, sum(tokens)),
            images=self.files({digest: body for group in groups for digest, body in group.images.items()}),
        )


def collate(rows: Sequence[TrainRow], images: ImageFiles | None = None) -> MicroBatch:
    """Tensors of one micro-batch. Without rows it is one short row without a loss token: a rank that has
    nothing to do still takes part in the collectives of the others."""
    longest = max((len(row.tokens) for row in rows), default=0)
    shape = (max(1, len(rows)), max(2, longest))

    def filled(read: Callable[[TrainRow], npt.NDArray[np.generic] | float], empty: int, dtype: type) -> Tensor:
        out: npt.NDArray[Any] = np.full(shape, empty, dtype=dtype)
        for place, row in enumerate(rows):
            out[place, : len(row.tokens)] = read(row)
        return torch.from_numpy(out)

    def spread(values: Sequence[float]) -> Tensor:
        column = torch.tensor([*values] or [0.0], dtype=torch.float32)[:, None]
        return torch.where(mask, column, 0.0)

    def advantages() -> Tensor:
        same = [row.advantage for row in rows if isinstance(row.advantage, float)]
        if len(same) == len(rows):
            return spread(same)
        each = filled(lambda row: a if isinstance(a := row.advantage, float) else a.numpy(), 0, np.float32)[:, 1:]
        return torch.where(mask, each, 0.0)

    tokens = filled(lambda row: row.tokens.numpy(), 0, np.int64)
    mask = filled(lambda row: row.loss_mask.numpy(), 0, np.bool_)[:, 1:].contiguous()
    return MicroBatch(
        tokens=tokens,
        targets=tokens[:, 1:].contiguous(),
        mask=mask,
        rollout_logprobs=filled(lambda row: row.logprobs.numpy(), 0, np.float32)[:, 1:].contiguous(),
        advantages=advantages(),
        weights=spread([row.weight for row in rows]),
        versions=filled(lambda row: row.versions(), -1, np.int64)[:, 1:].contiguous(),
        sequence=torch.tensor([row.sequence for row in rows] or [-1]),
        sample=torch.tensor([row.sample for row in rows] or [-1]),
        group=torch.tensor([row.group for row in rows] or [-1]),
        # A forward pass leaves out the last token, which predicts nothing.
        lengths=torch.tensor([max(1, len(row.tokens) - 1) for row in rows] or [1]),
        images=None if images is None else images.batch([row.images for row in rows], shape[1]),
        temperatures=[row.temperature for row in rows] or [1.0],
        routed_experts=_routed_experts(rows, shape),
    )


def _routed_experts(rows: Sequence[TrainRow], shape: tuple[int, int]) -> Tensor | None:
    """See MicroBatch. DataError when two rows are not of one model."""
    sizes = {(row.routed_experts.layers, row.routed_experts.k) for row in rows if row.routed_experts is not None}
    if not sizes:
        return None
    if len(sizes) > 1:
        raise DataError(f"samples of one step have routed_experts of different (layers, experts): {sorted(sizes)}")
    out = np.full((*shape, *sizes.pop()), -1, dtype=np.int16)
    for place, row in enumerate(rows):
        if row.routed_experts is not None:
            chosen = row.routed_experts.numpy()
            unknown = np.iinfo(chosen.dtype).max
            out[place, : len(chosen)] = np.where(chosen == unknown, np.int16(-1), chosen.astype(np.int16))
    return torch.from_numpy(out)
