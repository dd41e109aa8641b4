"""Several datasets in one order: each has its share, goes through its own epochs, and depends on the position alone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producers.datasets.mixture import LONGEST_CYCLE, Mixture, Part, Place, spread, whole_shares
from producers.datasets.prompt_order import PromptOrder
from tests.support.user_code.datasets import Numbers


def mixture(*sizes_and_weights: tuple[int, float], seed: int = 0) -> Mixture:
    parts = [Part(str(i), [Numbers(size)], weight) for i, (size, weight) in enumerate(sizes_and_weights)]
    return Mixture(parts, seed)


def test_one_dataset_has_the_order_that_it_has_alone() -> None:
    order = PromptOrder(10, 3)
    assert [mixture((10, 5.0), seed=3).at(p) for p in range(25)] == [
        Place(0, 0, *order.at(p), order.at(p)[1]) for p in range(25)
    ]


def test_each_dataset_has_its_share_in_every_stretch_of_positions() -> None:
    mixed = mixture((100, 0.7), (50, 0.2), (5, 0.1))
    for first in (0, 10, 990):
        parts = Counter(mixed.at(position).part for position in range(first, first + 10))
        assert parts == {0: 7, 1: 2, 2: 1}


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 12), st.sampled_from([0.25, 1.0, 2.0, 3.5])), min_size=1, max_size=4))
def test_each_dataset_goes_through_all_its_examples_in_each_epoch(parts: list[tuple[int, float]]) -> None:
    mixed = mixture(*parts)
    seen: dict[tuple[int, int], list[int]] = {}
    for position in range(300):
        place = mixed.at(position)
        seen.setdefault((place.part, place.epoch), []).append(place.index)
    for (part, epoch), indices in seen.items():
        assert len(set(indices)) == len(indices)
        if (part, epoch + 2) in seen:
            assert sorted(indices) == list(range(parts[part][0]))


@pytest.mark.parametrize(
    ("weights", "shares"),
    [([1, 1], [1, 1]), ([0.7, 0.3], [7, 3]), ([0.1, 0.2], [1, 2]), ([2, 4, 6], [1, 2, 3]), ([5], [1])],
)
def test_weights_become_the_least_whole_numbers(weights: list[float], shares: list[int]) -> None:
    assert whole_shares(weights) == shares


def test_weights_that_are_far_apart_leave_every_dataset_a_place() -> None:
    shares = whole_shares([1.0, 1e-9, 0.333333])
    assert min(shares) == 1
    assert sum(shares) <= LONGEST_CYCLE + 3


def test_places_of_a_dataset_are_spread_evenly() -> None:
    assert spread([3, 1]) == [0, 0, 1, 0]
    assert spread([1, 1]) == [0, 1]


def test_a_position_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="position -1 must be 0 or more"):
        mixture((3, 1.0)).at(-1)


def test_levels_take_turns_and_each_has_one_statistic() -> None:
    levels = [Numbers(4), Numbers(2), Numbers(3)]
    mixed = Mixture([Part("plain", [Numbers(5)], 1.0), Part("steps", levels, 3.0)])
    places = [mixed.at(position) for position in range(24)]
    assert {place.statistic for place in places if place.part == 0} == set(range(5)), "one a prompt"
    steps = [place for place in places if place.part == 1]
    assert [(place.level, place.statistic) for place in steps[:6]] == [(0, 5), (1, 6), (2, 7)] * 2
    assert sorted(place.index for place in steps if place.level == 1 and place.epoch == 0) == [0, 1]
    assert mixed.dataset(steps[1]) is levels[1]
