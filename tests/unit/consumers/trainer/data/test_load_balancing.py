"""Rows of a step: shares for each rank, nearly equal in work, and rows with a common beginning kept together."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.trainer.data.load_balancing import (
    WORTH_IT,
    Cost,
    RowFamily,
    count_shared,
    find_families,
    partition,
    shares,
    shares_of_families,
    work,
)


def tail(count: int, seed: int = 0, longest: int = 1024) -> list[int]:
    """Heavy-tailed lengths with a mean near 150."""
    rng = random.Random(seed)
    return [min(longest, max(8, int(rng.lognormvariate(4.6, 0.9)))) for _ in range(count)]


def share_work(lengths: list[int]) -> list[float]:
    return [Cost(token=1.0, square=0.002, loss=0.2).of(length, length // 2) for length in lengths]


@given(
    lengths=st.lists(st.integers(1, 300), max_size=60),
    dp_size=st.integers(1, 5),
    max_tokens=st.integers(8, 600),
    packed=st.booleans(),
)
def test_every_sample_has_one_micro_batch(lengths: list[int], dp_size: int, max_tokens: int, packed: bool) -> None:
    dealt = shares(share_work(lengths), lengths, dp_size, max_tokens, packed=packed)
    assert len(dealt) == dp_size
    assert len({len(micro_batches) for micro_batches in dealt}) == 1
    micro_batches = list(itertools.chain.from_iterable(dealt))
    assert sorted(itertools.chain.from_iterable(micro_batches)) == list(range(len(lengths)))
    for items in micro_batches:
        used = [lengths[item] for item in items]
        assert (sum(used) if packed else len(used) * max(used, default=0)) <= max_tokens or len(items) == 1
    assert dealt == shares(share_work(lengths), lengths, dp_size, max_tokens, packed=packed)


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


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), dp_size=st.sampled_from([2, 3, 4, 8]), count=st.integers(64, 512))
def test_heavy_tailed_samples_come_out_within_a_few_percent_of_equal(seed: int, dp_size: int, count: int) -> None:
    lengths = tail(count, seed)
    costs = share_work(lengths)
    dealt = shares(costs, lengths, dp_size, max_tokens=1 << 20)
    loads = [sum(costs[item] for items in micro_batches for item in items) for micro_batches in dealt]
    assert max(loads) <= max(1.02 * sum(costs) / dp_size, max(costs) + min(costs))


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), dp_size=st.sampled_from([2, 4]))
def test_micro_batches_that_run_together_cost_the_same(seed: int, dp_size: int) -> None:
    lengths = tail(800, seed)
    costs = share_work(lengths)
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
    costs = share_work(lengths)
    dealt = shares(costs, lengths, dp_size, max_tokens)
    loads = [sum(costs[item] for items in micro_batches for item in items) for micro_batches in dealt]
    assert max(loads) <= 1.001 * sum(costs) / dp_size


def test_rows_of_one_length_lie_side_by_side() -> None:
    lengths = [5, 3, 9, 3, 5, 3]
    (rows,) = shares(list(map(float, lengths)), lengths, 1, 100)[0]
    assert [lengths[row] for row in rows] == [3, 3, 3, 5, 5, 9]
    assert rows == [1, 3, 5, 0, 4, 2]


def rows_of(*rows: list[int]) -> list[np.ndarray]:
    return [np.array(row, dtype=np.int32) for row in rows]


def test_rows_of_a_group_that_begin_alike_are_a_family_and_know_what_they_share() -> None:
    rows = rows_of([7, 8, 9, 1], [5, 5, 5], [7, 8, 2, 3], [7, 8, 9, 4])
    found = find_families(rows, [0, 0, 0, 0], most=100)
    # The last token of a row predicts nothing, so that 9 is shared and what follows is not.
    assert sorted((sorted(family.rows), family.shared) for family in found) == [([0, 2, 3], 5), ([1], 0)]


def test_rows_of_different_groups_and_of_too_many_tokens_are_apart() -> None:
    rows = rows_of(*[[7, 8, 9, end] for end in range(5)])
    assert [family.rows for family in find_families(rows, [0, 0, 1, 1, 1], most=100)] == [[0, 1], [2, 3, 4]]
    assert [len(family.rows) for family in find_families(rows, [0] * 5, most=8)] == [2, 2, 1]
    assert [family.rows for family in find_families(rows[:1], [0], most=2)] == [[0]]


def test_families_are_whole_where_that_is_faster() -> None:
    rows = rows_of(*[[group] * 50 + [end] for group in range(8) for end in range(4)])
    groups, lengths = [row // 4 for row in range(32)], [51] * 32
    families = find_families(rows, groups, most=408)
    dealt = shares_of_families([51.0] * 32, lengths, 2, 408, families, 1.0)
    assert all(len({groups[row] for row in rows}) == len(rows) / 4 for share in dealt for rows in share)
    assert work(dealt, [51.0] * 32, families, 1.0) == [[8 * 51.0 - 6 * 50] * 2] * 2


def test_families_are_halved_where_ranks_would_have_nothing_to_do() -> None:
    """Two families on four ranks, by row each rank would have one of both."""
    rows = rows_of(*[[group] * 20 + [10 * group + row] * 31 for group in range(1, 3) for row in range(1, 5)])
    families = find_families(rows, [0] * 4 + [1] * 4, most=1000)
    dealt = shares_of_families([51.0] * 8, [51] * 8, 4, 1000, families, 1.0)
    assert work(dealt, [51.0] * 8, families, 1.0) == [[2 * 51.0 - 20]] * 4


def test_families_are_cut_where_whole_ones_keep_ranks_waiting() -> None:
    """Three families on two ranks: one rank would have twice as much, to save little."""
    families = [RowFamily(list(range(4 * f, 4 * f + 4)), common=[1, 1, 1], read=[99] * 4) for f in range(3)]
    dealt = shares_of_families([100.0] * 12, [100] * 12, 2, 1200, families, 1.0)
    assert [len(rows) for share in dealt for rows in share] == [6, 6]


@given(
    rows=st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 1), min_size=1, max_size=12)), max_size=24),
    dp_size=st.integers(1, 4),
    most=st.integers(4, 60),
)
def test_every_row_is_in_one_micro_batch_with_room(rows: list[tuple[int, list[int]]], dp_size: int, most: int) -> None:
    lengths = [len(tokens) for _, tokens in rows]
    families = find_families(rows_of(*[tokens for _, tokens in rows]), [group for group, _ in rows], most)
    dealt = shares_of_families([float(length) for length in lengths], lengths, dp_size, most, families, 1.0)
    assert len({len(share) for share in dealt}) == 1
    assert sorted(row for share in dealt for found in share for row in found) == list(range(len(rows)))
    for found in (found for share in dealt for found in share):
        assert sum(lengths[row] for row in found) <= most or len(found) == 1
    by_row = shares([float(length) for length in lengths], lengths, dp_size, most)
    assert slowest(work(dealt, lengths, families, 1.0)) <= slowest(work(by_row, lengths, families, 1.0))


@given(
    rows=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=12),
    where=st.lists(st.integers(0, 2), min_size=12, max_size=12),
)
def test_rows_of_a_cut_family_share_what_is_there(rows: list[list[int]], where: list[int]) -> None:
    micro_batches = [[row for row in range(len(rows)) if where[row] == index] for index in range(3)]
    families = find_families(rows_of(*rows), [0] * len(rows), most=1000)
    # The last token of a row predicts nothing and is not read.
    prefixes = [
        [tuple(rows[row][:end]) for row in found for end in range(1, len(rows[row]))] for found in micro_batches
    ]
    wanted = [len(each) - len({*each}) for each in prefixes]
    wanted = [n if n >= WORTH_IT * len(each) else 0 for n, each in zip(wanted, prefixes, strict=True)]
    assert count_shared(families, micro_batches) == wanted


def test_what_is_too_little_to_be_computed_once_is_not_counted() -> None:
    """The model computes it for each row, and a step's figures say so."""
    rows = rows_of(*[[7, *range(10 * row, 10 * row + 10)] for row in range(2)], [1, 2], [1, 3])
    assert count_shared(find_families(rows, [0, 0, 1, 1], most=100), [[0, 1], [2, 3]]) == [0, 1]


def slowest(found: list[list[float]]) -> float:
    return float(sum(max(each) for each in zip(*found, strict=True)))
