"""Batches: everything per token is shifted together, bounded, and weighted independently of how it is cut."""

from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from consumers.trainer.algorithms import AGGREGATIONS
from consumers.trainer.algorithms.advantages import Totals, centered, grpo, raw
from consumers.trainer.data.collate import MicroBatch, collate
from consumers.trainer.data.groups import Group
from consumers.trainer.data.load_balancing import Cost
from consumers.trainer.data.plan import StepPlan, StepPlanner
from schemas.codec import Array
from schemas.errors import DataError
from schemas.messages import Span, Trajectory
from tests.support.trainer.trajectories import make_groups, make_trajectory


def planned(
    groups: list[Group],
    budget: int = 64,
    aggregation: str = "token_mean",
    dp_size: int = 1,
    minibatches: int = 1,
) -> StepPlan:
    return StepPlanner(
        advantage=centered,
        aggregation=AGGREGATIONS.get(aggregation),
        micro_batch_tokens=budget,
        max_tokens=7,
        dp_size=dp_size,
        minibatches=minibatches,
    ).plan(groups)


def built(groups: list[Group], budget: int = 64) -> list[MicroBatch]:
    return [collate(rows) for rows in planned(groups, budget).share(0)]


def test_everything_per_token_is_about_the_same_token() -> None:
    """Versions that aren't shifted with log-probabilities put staleness one token off."""
    sample = Trajectory(
        run="r",
        task_id=4,
        sample=0,
        kind="train",
        tokens=Array.of([5, 6, 7, 8], "i4"),
        loss_mask=Array.of([0, 0, 1, 1], "u1"),
        logprobs=Array.of([0.0, 0.0, -0.7, -0.8], "f4"),
        spans=[Span(3, 2, 3), Span(9, 3, 4)],
        turns=[],
        finish="stop",
        prompt="",
        completion="",
        generator="g",
    )
    other = make_trajectory(task_id=4, sample=1, prompt=1, completion=1)
    (batch,) = built([Group(4, [(sample, 1.0), (other, 0.0)])], budget=1000)
    row = batch.sequence.tolist().index(0)
    assert batch.tokens[row].tolist() == [5, 6, 7, 8]
    assert batch.targets[row].tolist() == [6, 7, 8]
    assert batch.mask[row].tolist() == [False, True, True]
    assert batch.rollout_logprobs[row].tolist() == pytest.approx([0.0, -0.7, -0.8])
    assert batch.versions[row].tolist() == [-1, 3, 9]
    assert batch.advantages[row].tolist() == [0.0, 0.5, 0.5]
    assert batch.weights[row].tolist() == pytest.approx([0.0, 1 / 3, 1 / 3])


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6), seed=st.integers(0, 99), budget=st.integers(8, 200))
@example(sizes=[2, 5, 5, 5], seed=0, budget=8)
def test_every_sample_is_in_one_micro_batch_within_the_budget(sizes: list[int], seed: int, budget: int) -> None:
    groups = make_groups(sizes, seed)
    samples = [t for group in groups for t, _ in group.samples]
    whole, micro_batches = planned(groups, budget), built(groups, budget)
    rows = sorted(int(s) for micro in micro_batches for s in micro.sequence)
    assert rows == list(range(len(samples)))
    for micro in micro_batches:
        used = [len(samples[s].tokens) for s in micro.sequence.tolist()]
        assert sum(used) <= budget or len(used) == 1
        assert micro.lengths.tolist() == [max(1, length - 1) for length in used]
        for row, s in enumerate(micro.sequence.tolist()):
            length = len(samples[s].tokens)
            assert micro.tokens[row, :length].tolist() == samples[s].tokens.numpy().tolist()
            assert not micro.mask[row, length - 1 :].any()
    assert sum(int(m.mask.sum()) for m in micro_batches) == whole.samples.lengths.sum()


def test_a_sequence_over_the_budget_gets_a_micro_batch_of_its_own() -> None:
    groups = [Group(0, [(make_trajectory(0, s, 3, length), 0.0) for s, length in enumerate([2, 40, 2])])]
    assert sorted(len(m.tokens) for m in built(groups, budget=10)) == [1, 2]


def test_samples_of_one_task_in_two_pieces_are_one_group() -> None:
    """Groups are found by task id, never by position."""
    pieces = [
        Group(1, [(make_trajectory(1, 0), 1.0)]),
        Group(2, [(make_trajectory(2, 0), 5.0), (make_trajectory(2, 1), 3.0)]),
        Group(1, [(make_trajectory(1, 1), 0.0)]),
    ]
    assert planned(pieces).credit.samples.tolist() == [0.5, 1.0, -1.0, -0.5]


def test_group_of_one_trains_nothing() -> None:
    (batch,) = built([Group(0, [(make_trajectory(0), 1.0)])])
    assert float(batch.advantages.abs().sum()) == 0.0


def test_truncation_is_the_finish_reason_and_not_the_padding() -> None:
    longest = make_trajectory(0, 0, completion=20)
    cut = make_trajectory(0, 1, completion=2, finish="length")
    assert planned([Group(0, [(longest, 1.0), (cut, 0.0)])]).samples.truncated.tolist() == [False, True]


def weight_by_hand(name: str, lengths: list[int], groups: list[int], s: int, max_tokens: int) -> float:
    if name == "token_mean":
        return 1 / sum(lengths)
    if name == "sequence_mean":
        return 1 / lengths[s] / len(lengths)
    if name == "prompt_mean":
        return 1 / sum(n for n, g in zip(lengths, groups, strict=True) if g == groups[s]) / len(set(groups))
    return 1 / len(lengths) / max_tokens


@pytest.mark.parametrize("name", AGGREGATIONS.names)
def test_weights_follow_their_definition(name: str) -> None:
    lengths, groups = [3, 1, 4, 1, 5], [0, 0, 1, 2, 2]
    got = AGGREGATIONS.get(name)(np.array(lengths), np.array(groups), Totals(14, 5, 3, 8))
    want = [weight_by_hand(name, lengths, groups, s, 8) for s in range(5)]
    assert got.tolist() == pytest.approx(want)


@pytest.mark.parametrize("name", AGGREGATIONS.names)
def test_samples_without_tokens_do_not_divide_by_zero(name: str) -> None:
    got = AGGREGATIONS.get(name)(np.array([0, 0]), np.array([0, 1]), Totals(0, 2, 2, 4))
    assert np.isfinite(got).all()


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6), seed=st.integers(0, 99), dp_size=st.integers(1, 4))
def test_ranks_share_a_step_whose_numbers_are_those_of_one(sizes: list[int], seed: int, dp_size: int) -> None:
    """Groups may be split over ranks: their rewards are compared before."""
    groups = make_groups(sizes, seed)
    one, many = planned(groups), planned(groups, dp_size=dp_size)
    assert one.credit.samples.tolist() == many.credit.samples.tolist()
    dealt = [row for rank in range(dp_size) for rows in many.share(rank) for row in rows]
    assert sorted((r.sequence, r.cut.sample, r.advantage, r.weight) for r in dealt) == [
        (r.sequence, r.cut.sample, r.advantage, r.weight) for r in one.rows
    ]
    assert len({len(many.share(rank)) for rank in range(dp_size)}) == 1


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    seed=st.integers(0, 99),
    dp_size=st.integers(1, 3),
    minibatches=st.integers(2, 4),
)
def test_a_minibatch_is_whole_groups_reweighted(sizes: list[int], seed: int, dp_size: int, minibatches: int) -> None:
    """Every row is in one of them, rewards are compared over the step, and ranks make equally many updates."""
    groups = make_groups(sizes, seed)
    whole, cut = planned(groups), planned(groups, dp_size=dp_size, minibatches=minibatches)
    assert cut.credit.samples.tolist() == whole.credit.samples.tolist()
    assert len(cut.deal.updates) == min(minibatches, len(groups))
    ends = np.cumsum([0, *cut.deal.updates])
    seen: list[set[int]] = []
    for start, end in pairwise(ends):
        rows = [row for r in range(dp_size) for part in cut.share(r)[start:end] for row in part]
        seen.append({row.group for row in rows})
        tokens = sum(row.cut.loss_tokens for row in rows)
        assert sum(row.weight * row.cut.loss_tokens for row in rows) == pytest.approx(float(tokens > 0))
    assert sum(len(each) for each in seen) == len(set().union(*seen)) == len(groups)
    assert {len(cut.share(rank)) for rank in range(dp_size)} == {ends[-1]}
    assert sorted(r for rank in cut.deal.shares for rows in rank for r in rows) == list(range(len(cut.rows)))


def test_a_rank_without_samples_has_a_row_without_a_loss() -> None:
    empty = collate([])
    assert empty.tokens.shape == (1, 2)
    assert not empty.mask.any()


def test_what_is_shared_counts_where_a_group_is_on_two_ranks() -> None:
    """Three rows on two ranks: two of them share a prompt of 10 tokens, the third is by itself."""
    samples = [(make_trajectory(task_id=4, sample=s, prompt=10, completion=2), float(s)) for s in range(3)]
    planner = StepPlanner(
        centered,
        AGGREGATIONS.get("token_mean"),
        micro_batch_tokens=36,
        max_tokens=7,
        dp_size=2,
        cost=Cost(token=2.0),
        share_prefixes=True,
    )
    plan = planner.plan([Group(4, samples)])
    assert sorted(len(rows) for share in plan.deal.shares for rows in share) == [1, 2]
    assert plan.deal.shared_fraction == 10 / 36
    assert sorted(plan.deal.loads) == [24.0, 28.0]


def test_an_advantage_function_that_breaks_its_promise_is_named() -> None:
    def broken(rewards: npt.NDArray[np.float64], groups: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        return rewards / 0.0 if len(rewards) else rewards

    with np.errstate(all="ignore"), pytest.raises(DataError, match="finite"):
        StepPlanner(broken, AGGREGATIONS.get("token_mean"), micro_batch_tokens=64, max_tokens=7).plan(make_groups([2]))


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean", "prompt_mean", "constant"])
def test_a_sample_without_a_loss_token_costs_the_others_no_weight(name: str) -> None:
    """Nor does a group of such samples alone: there is nothing of theirs to take a mean over."""
    full = [Group(1, [(make_trajectory(1, s), float(s)) for s in range(2)])]
    empty = [(make_trajectory(1, s, completion=0), 0.0) for s in range(2, 4)]
    groups = [Group(1, [*full[0].samples, *empty]), Group(2, [(make_trajectory(2, 0, completion=0), 1.0)])]
    weights = [[row.weight for row in planned(each, aggregation=name).rows] for each in (full, groups)]
    assert weights[1][:2] == weights[0]


def test_two_groups_of_one_prompt_are_one() -> None:
    """Their rewards are compared with each other, so their tokens share one mean too."""
    samples = [(make_trajectory(1, s), float(s)) for s in range(4)]
    apart = planned([Group(1, samples[:2]), Group(1, samples[2:])], aggregation="prompt_mean")
    together = planned([Group(1, samples)], aggregation="prompt_mean")
    assert [row.weight for row in apart.rows] == [row.weight for row in together.rows]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "prompt_mean", "constant"])
def test_a_truncated_sample_gives_no_gradient_and_counts_in_no_mean(aggregation: str) -> None:
    """Its reward still counts in the group's mean, so the others' advantages are as they are without the mask."""
    ended = [make_trajectory(4, s, prompt=1, completion=length) for s, length in enumerate((2, 3))]
    cut = make_trajectory(4, 2, prompt=1, completion=6)
    cut.finish = "length"
    rewards = (1.0, 0.0, 0.0)
    group = Group(4, list(zip([*ended, cut], rewards, strict=True)))
    settings = (AGGREGATIONS.get(aggregation), 1000, 7)
    plan = StepPlanner(centered, *settings, mask_truncated=True).plan([group])
    plain = StepPlanner(centered, *settings).plan([group])
    without = StepPlanner(centered, *settings).plan([Group(4, group.samples[:2])])
    assert [row.weight for row in plan.rows] == [*(row.weight for row in without.rows), 0.0]
    assert plain.rows[2].weight > 0
    assert plan.credit.samples.tolist() == plain.credit.samples.tolist()
    assert (plan.samples.lengths.tolist(), plan.samples.truncated.tolist()) == ([2, 3, 6], [False, False, True])


def test_samples_of_a_tenant_are_compared_with_each_other() -> None:
    """Stars from 1 to 5 and thumbs of 0 and 1 in one step: each tenant has a baseline and a scale of its own."""
    given = [("stars", 5.0), ("thumbs", 1.0), ("stars", 1.0), ("thumbs", 0.0), ("alone", 3.0)]
    groups = [
        Group(task_id, [(msgspec.structs.replace(make_trajectory(task_id), data={"tenant": tenant}), reward)])
        for task_id, (tenant, reward) in enumerate(given)
    ]
    planner = StepPlanner(grpo, AGGREGATIONS.get("token_mean"), 64, max_tokens=7, by_tenant=True)
    found = planner.plan(groups).credit.samples
    assert found == pytest.approx([2**-0.5, 2**-0.5, -(2**-0.5), -(2**-0.5), 0.0], rel=1e-5)


def test_a_dataset_may_have_an_advantage_a_loss_and_a_weight_of_its_own() -> None:
    datasets = ["a", "b", "a", "c"]
    groups = [
        Group(each.task_id, [(msgspec.structs.replace(sample, dataset=dataset), r) for sample, r in each.samples])
        for each, dataset in zip(make_groups([3, 3, 2, 2]), datasets, strict=True)
    ]
    planner = StepPlanner(
        centered,
        AGGREGATIONS.get("token_mean"),
        64,
        max_tokens=7,
        advantages={"b": raw},
        losses={"b": 1},
        weights={"b": 2.0},
        unrewarded=frozenset("c"),
    )
    plan = planner.plan(groups)
    own = {name: [k for k, one in enumerate(plan.samples.trajectories) if one.dataset == name] for name in "abc"}
    assert plan.credit.samples[own["b"]].tolist() == plan.samples.rewards[own["b"]].tolist()
    alone = StepPlanner(centered, AGGREGATIONS.get("token_mean"), 64, max_tokens=7).plan([groups[0], groups[2]])
    assert plan.credit.samples[own["a"]].tolist() == alone.credit.samples.tolist()
    assert not plan.credit.samples[own["c"]].any()
    tokens = sum(plan.samples.lengths[own["a"] + own["b"]])
    want = {"a": 1 / tokens, "b": 2 / tokens, "c": 0.0}
    for row in plan.rows:
        dataset = plan.samples.trajectories[row.cut.sample].dataset
        assert row.weight == pytest.approx(want[dataset])
        assert row.loss == (dataset == "b")
    assert [float(plan.credit.samples[row.cut.sample]) for row in plan.rows] == [row.advantage for row in plan.rows]
