"""The prompt order: a position decides the example, and nothing else does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.datasets.prompt_order import PromptOrder


@given(st.integers(1, 300), st.integers(0, 2**63), st.integers(0, 50))
def test_every_epoch_takes_every_example_once(length: int, seed: int, epoch: int):
    order = PromptOrder(length, seed)
    places = [order.at(epoch * length + i) for i in range(length)]
    assert {e for e, _ in places} == {epoch}
    assert sorted(index for _, index in places) == list(range(length))


@given(st.integers(1, 2**40), st.integers(0, 2**70))
def test_any_position_of_any_length_has_its_place(length: int, position: int):
    epoch, index = PromptOrder(length, seed=1).at(position)
    assert epoch == position // length
    assert 0 <= index < length


def test_the_order_is_the_same_on_every_machine_and_release():
    order = PromptOrder(10, seed=0)
    assert [order.at(i)[1] for i in range(10)] == [2, 3, 7, 1, 5, 8, 0, 6, 4, 9]


def test_epochs_and_seeds_differ_and_no_shuffle_counts():
    def epoch(seed: int, number: int) -> list[int]:
        return [PromptOrder(100, seed).at(number * 100 + i)[1] for i in range(100)]

    assert epoch(0, 0) != epoch(0, 1)
    assert epoch(0, 0) != epoch(1, 0)
    plain = PromptOrder(3, seed=5, shuffle=False)
    assert [plain.at(i) for i in range(5)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


def test_first_places_are_spread_evenly():
    counts = [0] * 10
    for seed in range(2000):
        counts[PromptOrder(10, seed).at(0)[1]] += 1
    assert min(counts) > 120, counts


@pytest.mark.parametrize("call", [lambda: PromptOrder(0), lambda: PromptOrder(1).at(-1)])
def test_nonsense_is_refused(call):
    with pytest.raises(ValueError, match="or more"):
        call()
