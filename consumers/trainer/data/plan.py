"""The plan of a step: samples are cut into rows, get credit and weights, and are dealt to ranks.

Each stage is a function, and no tensor is made before the last one. The same groups give the same plan, so that a
replay is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from consumers.trainer.algorithms.advantages import Aggregation, Floats, Ints, Totals, one_each
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
from consumers.trainer.data.rows import Samples, TrainRow, choose, cut
from schemas.images import ImageSettings
from schemas.messages import TENANT


def credit_of(samples: Samples, advantages: Sequence[AnyAdvantage | None], by_name: bool = False) -> Credit:
    """Compare the rewards of the samples that have the same advantage, [S]. Those with None get 0."""
    given = Credit([0.0] * len(samples.rows), np.zeros(len(advantages)))
    for advantage in {id(one): one for one in advantages if one is not None}.values():
        chosen = np.array([one is advantage for one in advantages], dtype=np.bool_)
        if chosen.all():
            return give_credit(advantage, samples, by_name)
        found = give_credit(advantage, choose(samples, chosen), by_name)
        given.samples[chosen] = found.samples
        places = (place for place, row in enumerate(samples.rows) if chosen[row.sample])
        for place, value in zip(places, found.rows, strict=True):
            given.rows[place] = value
    return given


def give_credit(advantage: AnyAdvantage, samples: Samples, by_name: bool) -> Credit:
    """Give credit to samples, or finer; DataError if the advantage is not one finite number for each."""
    if by_name or getattr(advantage, "per_token", False) or getattr(advantage, "per_turn", False):
        return give_finer_credit(advantage, samples, by_name)
    found = one_each("advantages", advantage(samples.rewards, samples.groups), len(samples.rewards))
    return Credit([float(found[row.sample]) for row in samples.rows], found)


def weigh(
    samples: Samples, shares: Floats, aggregation: Aggregation, max_tokens: int, mask_truncated: bool = False
) -> Floats:
    """Weigh samples by their loss tokens in all rows; DataError if a weight is not a finite number.

    shares: float64 [S], a factor of each sample's weight; where it is 0, the sample counts in no mean.
    """
    masked = (samples.truncated & mask_truncated) | (shares == 0)
    counted = np.where(masked, 0, samples.lengths)
    if not shares.any():
        return np.zeros(len(shares))
    totals = Totals.of(counted, samples.groups, max_tokens)
    found = one_each("weights of the aggregation", aggregation(counted, samples.groups, totals), len(counted))
    return np.where(masked, 0.0, shares * found)


def weigh_minibatches(
    samples: Samples, minibatch: Ints, shares: Floats, weigh_part: Callable[[Samples, Floats], Floats]
) -> Floats:
    """Weigh each minibatch's samples as if there were no others, so that its loss is a mean of its own."""
    found = np.zeros(len(shares))
    for number in np.unique(minibatch):
        part = minibatch == number
        columns = {name: getattr(samples, name)[part] for name in ("groups", "lengths", "truncated")}
        found[part] = weigh_part(replace(samples, **columns), shares[part])
    return found


@dataclass(frozen=True)
class Deal:
    """Which rank trains which rows.

    shares: indices of the rows of each data-parallel rank's micro-batches, ``[dp_rank][micro-batch][...]``. loads: work
    of each rank, float64 [dp_size]. shared_fraction: of the tokens of all rows, those computed with another row.
    updates: number of micro-batches of each minibatch, which is the same on every rank.
    """

    shares: Shares
    loads: Floats
    shared_fraction: float
    updates: Sequence[int] = ()


def deal(
    samples: Samples, dp_size: int, micro_batch_tokens: int, cost: Cost, packed: bool = True, share: bool = False
) -> Deal:
    """Deal rows to ranks evenly. share: rows that begin alike belong together."""
    rows, most = samples.rows, micro_batch_tokens
    tokens = [len(row.tokens) for row in rows]
    costs = [cost.of(length, row.loss_tokens) for length, row in zip(tokens, rows, strict=True)]
    groups = [int(samples.groups[row.sample]) for row in rows]
    families = find_families([row.tokens.numpy() for row in rows], groups, most) if share else []
    if families:
        dealt = shares_of_families(costs, tokens, dp_size, most, families, cost.token)
    else:
        dealt = shares(costs, tokens, dp_size, most, packed=packed)
    shared = sum(count_shared(families, [rows for micro_batches in dealt for rows in micro_batches]))
    loads = np.array([sum(each) for each in work(dealt, costs, families, cost.token)], dtype=np.float64)
    return Deal(dealt, loads, shared / max(1, sum(tokens)), [len(dealt[0])])


def deal_minibatches(samples: Samples, minibatch: Ints, deal_part: Callable[[Samples], Deal]) -> Deal:
    """Deal the rows of each minibatch by themselves, one minibatch after the other."""
    numbers = [int(minibatch[row.sample]) for row in samples.rows]
    parts = [[r for r, number in enumerate(numbers) if number == wanted] for wanted in sorted(set(numbers))]
    dealt = [deal_part(replace(samples, rows=[samples.rows[r] for r in part])) for part in parts]
    tokens = [sum(len(samples.rows[r].tokens) for r in part) for part in parts]
    return Deal(
        [
            [[part[r] for r in rows] for part, each in zip(parts, dealt, strict=True) for rows in each.shares[rank]]
            for rank in range(len(dealt[0].shares))
        ],
        np.sum([each.loads for each in dealt], axis=0),
        sum(each.shared_fraction * count for each, count in zip(dealt, tokens, strict=True)) / max(1, sum(tokens)),
        [count for each in dealt for count in each.updates],
    )


@dataclass(frozen=True)
class StepPlan:
    """The results of all stages, and the rows that they make. weights: of each sample's loss tokens, float64 [S].

    images: their files, and how they are cut; None for a model of text. given: bool [S], the samples that are given
    answers, which have no reward; None in a batch without them.
    """

    samples: Samples
    credit: Credit
    weights: Floats
    deal: Deal
    rows: list[TrainRow]
    images: ImageFiles | None = None
    given: npt.NDArray[np.bool_] | None = None

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
        return StepBatch([collate(rows, self.images) for rows in self.share(dp_rank)], self, self.deal.updates)


@dataclass(frozen=True)
class StepBatch:
    """A rank's part of a step. plan: the whole, on the rank that made it. updates: micro-batches of each minibatch."""

    micro_batches: list[MicroBatch]
    plan: StepPlan | None = None
    updates: Sequence[int] = ()


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
    text. minibatches: into how many parts of whole groups a step is cut, each for an update of its own; advantages are
    compared over the whole step. teacher_weights, supervised_weights: of the datasets with a teacher, and of those
    whose samples are given answers, by label. unrewarded: datasets without a reward, which no advantage compares.
    advantages, losses, weights: of the datasets with others than the run's; a loss is its number in Objective.others,
    from 1. by_tenant: compare the samples of a tenant instead of those of a prompt. Each part of the loss, of rewards,
    of teachers and of given answers, is a mean over its own samples.
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
    minibatches: int = 1
    teacher_weights: Mapping[str, float] = field(default_factory=dict)
    supervised_weights: Mapping[str, float] = field(default_factory=dict)
    unrewarded: frozenset[str] = frozenset()
    advantages: Mapping[str, AnyAdvantage] = field(default_factory=dict)
    losses: Mapping[str, int] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    by_tenant: bool = False

    def files(self, bodies: Mapping[str, bytes]) -> ImageFiles | None:
        """Return these images with the way in which the model wants them; None for a model of text."""
        return None if self.images is None else ImageFiles(self.images, bodies)

    def plan(self, groups: Sequence[Group]) -> StepPlan:
        """Plan a step over all ranks; DataError unless every advantage and weight of a sample is a finite number."""
        samples = cut(groups)
        datasets = [trajectory.dataset for trajectory in samples.trajectories]
        advantages = [None if one in self.unrewarded else self.advantages.get(one, self.advantage) for one in datasets]
        rewarded = np.array([0.0 if one in self.unrewarded else self.weights.get(one, 1.0) for one in datasets])
        compared = samples
        if self.by_tenant:
            tenants = [str(trajectory.data.get(TENANT)) for trajectory in samples.trajectories]
            compared = replace(samples, groups=np.unique(tenants, return_inverse=True)[1].astype(np.int64))
        credited = credit_of(compared, advantages, self.by_name)
        taught = np.array([self.teacher_weights.get(dataset, 0.0) for dataset in datasets])
        supervised = np.array([self.supervised_weights.get(dataset, 0.0) for dataset in datasets])
        parts = (rewarded, taught, supervised)
        if self.minibatches > 1 and samples.rows:
            # A minibatch has whole groups. They are spread evenly, in the order of their task ids.
            count = int(samples.groups.max()) + 1
            minibatch = samples.groups * min(self.minibatches, count) // count
            weights, teacher, given = (weigh_minibatches(samples, minibatch, each, self._weigh) for each in parts)
            dealt = deal_minibatches(samples, minibatch, self._deal)
        else:
            weights, teacher, given = (self._weigh(samples, each) for each in parts)
            dealt = self._deal(samples)
        rows = [
            TrainRow(
                row,
                advantage,
                weight=float(weights[row.sample]),
                sequence=number,
                group=int(samples.groups[row.sample]),
                temperature=1.0 if supervised[row.sample] else samples.trajectories[row.sample].temperature,
                teacher_weight=float(teacher[row.sample]),
                supervised_weight=float(given[row.sample]),
                loss=self.losses.get(datasets[row.sample], 0),
                rewarded=bool(rewarded[row.sample]),
            )
            for number, (row, advantage) in enumerate(zip(samples.rows, credited.rows, strict=True))
        ]
        images = self.files({digest: body for group in groups for digest, body in group.images.items()})
        answers = supervised > 0 if supervised.any() else None
        return StepPlan(samples, credited, weights, dealt, rows, images, answers)

    def _weigh(self, samples: Samples, shares: Floats) -> Floats:
        return weigh(samples, shares, self.aggregation, self.max_tokens, self.mask_truncated)

    def _deal(self, samples: Samples) -> Deal:
        return deal(samples, self.dp_size, self.micro_batch_tokens, self.cost, self.packed, self.share_prefixes)
