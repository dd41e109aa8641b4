"""The plan of a step: samples are cut into rows, get credit and weights, and are dealt to ranks.

Each stage is a function with a frozen result, and no tensor is made before the last one: cut (rows.py), credit, weigh,
deal. The same groups give the same plan, so a replay is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from consumers.trainer.algorithms.advantages import one_each
from consumers.trainer.algorithms.aggregation import Aggregation, Totals
from consumers.trainer.data.collate import MicroBatch, collate
from consumers.trainer.data.credit import AnyAdvantage, Credit, give_finer_credit
from consumers.trainer.data.groups import Group
from consumers.trainer.data.load_balancing import (
    Cost,
    Shares,
    count_shared,
    find_families,
    shares,
    shares_of_families,
    work,
)
from consumers.trainer.data.patches import ImageFiles
from consumers.trainer.data.rows import Floats, Samples, TrainRow, cut
from schemas.images import ImageSettings


def credit(samples: Samples, advantage: AnyAdvantage, by_name: bool = False) -> Credit:
    """Compare the rewards of a step; DataError if the advantage is not one finite number for each that it is given."""
    if by_name or getattr(advantage, "per_turn", False) or getattr(advantage, "per_token", False):
        return give_finer_credit(advantage, samples, by_name)
    found = one_each("advantages", advantage(samples.rewards, samples.groups), len(samples.rewards))
    return Credit([float(found[row.sample]) for row in samples.rows], found)


@dataclass(frozen=True)
class SampleWeights:
    """Weights of the samples' loss tokens in the step's loss, float64 [S], and the totals that they divide by."""

    samples: Floats
    totals: Totals


def weigh(samples: Samples, aggregation: Aggregation, max_tokens: int, mask_truncated: bool = False) -> SampleWeights:
    """Weigh the samples by their loss tokens in all rows; DataError if a weight is not a finite number."""
    masked = samples.truncated & mask_truncated
    counted = np.where(masked, 0, samples.lengths)
    totals = Totals.of(counted, samples.groups, max_tokens)
    found = one_each("weights of the aggregation", aggregation(counted, samples.groups, totals), len(counted))
    return SampleWeights(np.where(masked, 0.0, found), totals)


@dataclass(frozen=True)
class Deal:
    """Which rank trains which rows.

    shares: indices of the rows of each data-parallel rank's micro-batches, ``[dp_rank][micro-batch][...]``. loads: work
    of each rank, float64 [dp_size]. shared_fraction: of the tokens of all rows, those computed with another row.
    """

    shares: Shares
    loads: Floats
    shared_fraction: float


def deal(
    samples: Samples, dp_size: int, micro_batch_tokens: int, cost: Cost, packed: bool = True, share: bool = False
) -> Deal:
    """Deal rows to ranks evenly. share: rows that begin alike belong together."""
    rows, most = samples.rows, micro_batch_tokens
    tokens = [len(row.tokens) for row in rows]
    costs = [cost.of(length, row.loss_tokens) for length, row in zip(tokens, rows, strict=True)]
    groups = [int(samples.groups[row.sample]) for row in rows]
    families = find_families([row.tokens.numpy() for row in rows], groups, most) if share else []
    dealt = (
        shares_of_families(costs, tokens, dp_size, most, families, cost.token)
        if families
        else shares(costs, tokens, dp_size, most, packed=packed)
    )
    shared = sum(count_shared(families, [rows for micro_batches in dealt for rows in micro_batches]))
    loads = np.array([sum(each) for each in work(dealt, costs, families, cost.token)], dtype=np.float64)
    return Deal(dealt, loads, shared / max(1, sum(tokens)))


@dataclass(frozen=True)
class StepPlan:
    """The results of all stages, and the rows that they make.

    images: their files, and how they are cut; None for a model of text.
    """

    samples: Samples
    credit: Credit
    weights: SampleWeights
    deal: Deal
    rows: list[TrainRow]
    images: ImageFiles | None = None

    def share(self, dp_rank: int) -> list[list[TrainRow]]:
        """Return the rows of each micro-batch of a rank."""
        return [[self.rows[r] for r in rows] for rows in self.deal.shares[dp_rank]]

    def files(self, dp_rank: int) -> dict[str, bytes]:
        """Return the bytes of the images of a rank's rows by digest."""
        if self.images is None:
            return {}
        wanted = {image.digest for rows in self.share(dp_rank) for row in rows for image in row.cut.images}
        return {digest: body for digest, body in self.images.files.items() if digest in wanted}

    def batch(self, dp_rank: int = 0) -> StepBatch:
        """Make the tensors of a rank's micro-batches, with the plan that they are a part of."""
        return StepBatch([collate(rows, self.images) for rows in self.share(dp_rank)], self)


@dataclass(frozen=True)
class StepBatch:
    """A rank's part of one optimizer step; plan: the whole of it, on the rank that made it."""

    micro_batches: list[MicroBatch]
    plan: StepPlan | None = None


@dataclass(frozen=True)
class StepPlanner:
    """Plans steps as the configuration says::

        plan = planner.plan(groups)
        batch = plan.batch(dp_rank=0)        # tensors of what rank 0 trains

    max_tokens: longest completion that sampling allows. micro_batch_tokens: most tokens of a micro-batch, with padding
    unless ``packed``, which says that all models of the step pack; a longer row gets one of its own. cost: work of a
    row, which ranks share evenly. by_name: see credit.py. mask_truncated: samples that ended at a limit have weight 0
    and count in no mean of the loss; their rewards are still compared with the others'. share_prefixes: whether the
    policy computes once what rows of a micro-batch begin with. images: how the model wants images, None for a model of
    text.
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
        """Return these images with the way in which the model wants them; None for a model of text."""
        return None if self.images is None else ImageFiles(self.images, bodies)

    def plan(self, groups: Sequence[Group]) -> StepPlan:
        """Plan a step over all ranks; a group may end up on several of them, and so may a sample.

        DataError if the advantage or the aggregation is not one finite number for each sample.
        """
        samples = cut(groups)
        given = credit(samples, self.advantage, self.by_name)
        weights = weigh(samples, self.aggregation, self.max_tokens, self.mask_truncated)
        dealt = deal(samples, self.dp_size, self.micro_batch_tokens, self.cost, self.packed, self.share_prefixes)
        rows = [
            TrainRow(
                row,
                advantage,
                weight=float(weights.samples[row.sample]),
                sequence=number,
                group=int(samples.groups[row.sample]),
                temperature=samples.trajectories[row.sample].temperature,
            )
            for number, (row, advantage) in enumerate(zip(samples.rows, given.rows, strict=True))
        ]
        images = self.files({digest: body for group in groups for digest, body in group.images.items()})
        return StepPlan(samples, given, weights, dealt, rows, images)
