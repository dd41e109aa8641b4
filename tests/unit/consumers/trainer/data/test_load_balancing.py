"""Shares of a step: nothing lost, nothing over the room, as many micro-batches for each rank, nearly equal work."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.trainer.data.load_balancing import Cost, partition, shares


def tail(count: int, seed: int = 0, longest: int = 1024) -> list[int]:
    """Heavy-tailed lengths with a mean near 150."""
    rng = random.Random(seed)
    return [min(longest, max(8, int(rng.lognormvariate(4.6, 0.9)))) for _ in range(count)]


def work(lengths: list[int]) -> list[float]:
    return [Cost(token=1.0, square=0.002, loss=0.2).of(length, length // 2) for length in lengths]


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), max_size=60),
    dp_size=st.integers(1, 5),
    max_tokens=st.integers(8, 600),
    packed=st.booleans(),
)
def test_every_sample_is_in_one_micro_batch_that_has_room(
    lengths: list[int], dp_size: int, max_tokens: int, packed: bool
) -> None:
    dealt = shares(work(lengths), lengths, dp_size, max_tokens, packed=packed)
    assert len(dealt) == dp_size
    assert len({len(micro_batches) for micro_batches in dealt}) == 1
    micro_batches = list(itertools.chain.from_iterable(dealt))
    assert sorted(itertools.chain.from_iterable(micro_batches)) == list(range(len(lengths)))
    for items in micro_batches:
        used = [lengths[item] for item in items]
        assert (sum(used) if packed else len(used) * max(used, default=0)) <= max_tokens or len(items) == 1
    assert dealt == shares(work(lengths), lengths, dp_size, max_tokens, packed=packed)


@settings(deadline=None)
@given(costs=st.lists(st.integers(1, 50), min_size=1, max_size=9), bins=st.integers(1, 3))
def test_the_fullest_bin_is_within_the_bound_of_the_best_cut(costs: list[int], bins: int) -> None:
    """Graham's bound for longest processing time first: 4/3 - 1/(3m) of the optimum."""
    found = partition(costs, [1] * len(costs), bins, max_tokens=len(costs))
    assert found is not None
    best = min(
        max(sum(c for c, b in zip(costs, cut, strict=True) if b == which) for which in range(bins))
        for cut in itertools.product(range(bins), repeat=len(costs))
    )
    assert max(sum(costs[i] for i in items) for items in found) <= (4 / 3 - 1 / (3 * bins)) * best + 1e-9


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), dp_size=st.sampled_from([2, 3, 4, 8]), count=st.integers(64, 512))
def test_heavy_tailed_samples_come_out_within_a_few_percent_of_equal(seed: int, dp_size: int, count: int) -> None:
    lengths = tail(count, seed)
    costs = work(lengths)
    dealt = shares(costs, lengths, dp_size, max_tokens=1 << 20)
    loads = [sum(costs[item] for items in micro_batches for item in items) for micro_batches in dealt]
    assert max(loads) <= max(1.02 * sum(costs) / dp_size, max(costs) + min(costs))


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10_000), dp_size=st.sampled_from([2, 4]))
def test_micro_batches_that_run_together_cost_the_same(seed: int, dp_size: int) -> None:
    lengths = tail(800, seed)
    costs = work(lengths)
    dealt = shares(costs, lengths, dp_size, max_tokens=16_384)
    totals = [[sum(costs[item] for item in items) for items in micro_batches] for micro_batches in dealt]
    waited = sum(max(together) for together in zip(*totals, strict=True))
    assert waited <= 1.03 * sum(costs) / dp_size


def test_a_sample_that_costs_more_than_a_share_stays_whole_and_alone() -> None:
    assert shares([100.0, 1.0, 1.0], [100, 1, 1], 2, max_tokens=50) == [[[0]], [[1, 2]]]


def test_fewer_samples_than_ranks_leave_empty_micro_batches() -> None:
    assert shares([1.0], [4], 3, max_tokens=8) == [[[0]], [[]], [[]]]
    assert shares([], [], 2, max_tokens=8) == [[[]], [[]]]


@pytest.mark.parametrize(("dp_size", "max_tokens"), [(2, 1 << 20), (8, 16_384), (64, 32_768)])
def test_ten_thousand_samples_come_out_all_but_equal(dp_size: int, max_tokens: int) -> None:
    lengths = tail(10_000)
    costs = work(lengths)
    dealt = shares(costs, lengths, dp_size, max_tokens)
    loads = [sum(costs[item] for items in micro_batches for item in items) for micro_batches in dealt]
    assert max(loads) <= 1.001 * sum(costs) / dp_size


def test_rows_of_one_length_lie_side_by_side() -> None:
    lengths = [5, 3, 9, 3, 5, 3]
    (rows,) = shares(list(map(float, lengths)), lengths, 1, 100)[0]
    assert [lengths[row] for row in rows] == [3, 3, 3, 5, 5, 9]
    assert rows == [1, 3, 5, 0, 4, 2]
