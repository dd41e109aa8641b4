"""Rows that begin alike belong together, as far as there is room and ranks are not kept waiting."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.trainer.data.load_balancing import (
    WORTH_IT,
    RowFamily,
    count_shared,
    find_families,
    shares,
    shares_of_families,
    work,
)


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


@settings(deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 1), min_size=1, max_size=12)), max_size=24),
    dp_size=st.integers(1, 4),
    most=st.integers(4, 60),
)
def test_every_row_is_in_one_micro_batch_that_has_room(
    rows: list[tuple[int, list[int]]], dp_size: int, most: int
) -> None:
    lengths = [len(tokens) for _, tokens in rows]
    families = find_families(rows_of(*[tokens for _, tokens in rows]), [group for group, _ in rows], most)
    dealt = shares_of_families([float(length) for length in lengths], lengths, dp_size, most, families, 1.0)
    assert len({len(share) for share in dealt}) == 1
    assert sorted(row for share in dealt for found in share for row in found) == list(range(len(rows)))
    for found in (found for share in dealt for found in share):
        assert sum(lengths[row] for row in found) <= most or len(found) == 1
    by_row = shares([float(length) for length in lengths], lengths, dp_size, most)
    assert slowest(work(dealt, lengths, families, 1.0)) <= slowest(work(by_row, lengths, families, 1.0))


@settings(deadline=None)
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
