"""A position decides its example: the order, the shares of a mixture, and what a curriculum skips."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producers.datasets.curriculum import MOST_PROMPTS, Curriculum, PromptStatistic
from producers.datasets.mixture import LONGEST_CYCLE, DatasetPart, Mixture, PromptRef, spread, whole_shares
from producers.datasets.prompt_order import PromptOrder
from schemas.config import CurriculumConfig, parse_config
from schemas.errors import ConfigError
from tests.support.configurations import minimal_config
from tests.support.user_code.datasets import Numbers

UNSEEN = PromptStatistic(0.0, 0, 0)


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


def mixture(*sizes_and_weights: tuple[int, float], seed: int = 0) -> Mixture:
    parts = [DatasetPart(str(i), [Numbers(size)], weight) for i, (size, weight) in enumerate(sizes_and_weights)]
    return Mixture(parts, seed)


def test_one_dataset_has_the_order_that_it_has_alone() -> None:
    order = PromptOrder(10, 3)
    assert [mixture((10, 5.0), seed=3).at(p) for p in range(25)] == [
        PromptRef(0, 0, *order.at(p), order.at(p)[1]) for p in range(25)
    ]


def test_each_dataset_has_its_share_in_every_stretch_of_positions() -> None:
    mixed = mixture((100, 0.7), (50, 0.2), (5, 0.1))
    for first in (0, 10, 990):
        parts = Counter(mixed.at(position).part for position in range(first, first + 10))
        assert parts == {0: 7, 1: 2, 2: 1}


@settings(max_examples=30)
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
    mixed = Mixture([DatasetPart("plain", [Numbers(5)], 1.0), DatasetPart("steps", levels, 3.0)])
    places = [mixed.at(position) for position in range(24)]
    assert {place.statistic for place in places if place.part == 0} == set(range(5)), "one a prompt"
    steps = [place for place in places if place.part == 1]
    assert [(place.level, place.statistic) for place in steps[:6]] == [(0, 5), (1, 6), (2, 7)] * 2
    assert sorted(place.index for place in steps if place.level == 1 and place.epoch == 0) == [0, 1]
    assert mixed.dataset(steps[1]) is levels[1]


def curriculum(seed: int = 0, **settings: Any) -> Curriculum:
    return Curriculum(CurriculumConfig(**settings), seed, group_size=8)


def share(chooses: Curriculum, solved: float, groups: int = 4, step: int = 0) -> float:
    """Share of positions that are taken of prompts with this statistic."""
    statistic = PromptStatistic(solved, groups, 0)
    return sum(chooses.takes(position, statistic, step) for position in range(4000)) / 4000


@pytest.mark.parametrize("name", ["uniform", "learnable", "band", "thompson"])
def test_a_prompt_without_a_group_is_always_taken(name: str) -> None:
    chooses = curriculum(name=name)
    assert all(chooses.takes(position, UNSEEN, 0) for position in range(500))


@pytest.mark.parametrize(
    ("settings", "solved", "expected"),
    [
        ({"name": "uniform"}, 0.0, 1.0),
        ({"name": "learnable"}, 0.5, 1.0),
        ({"name": "learnable"}, 0.25, 0.75),
        ({"name": "learnable"}, 0.0, 0.05),
        ({"name": "learnable", "floor": 0.2}, 1.0, 0.2),
        ({"name": "band"}, 0.2, 1.0),
        ({"name": "band"}, 0.9, 0.05),
        ({"name": "band", "between": [0.5, 1.0]}, 0.9, 1.0),
        # Of 32 samples none was right: the mean of 4p(1 - p) under Beta(1, 33).
        ({"name": "thompson", "floor": 0.001}, 0.0, 0.11),
        ({"name": "thompson"}, 0.5, 0.97),
    ],
)
def test_the_share_taken_follows_the_solve_rate(settings: dict[str, Any], solved: float, expected: float) -> None:
    assert share(curriculum(**settings), solved) == pytest.approx(expected, abs=0.03)


def test_thompson_sampling_is_surer_of_a_prompt_with_more_groups() -> None:
    thompson = curriculum(name="thompson")
    assert share(thompson, 0.0, groups=1) > share(thompson, 0.0, groups=4) + 0.1


def test_what_is_too_old_counts_no_more() -> None:
    forgets = curriculum(name="learnable", forget_after=100)
    assert share(forgets, 0.0, step=100) < 0.1
    assert share(forgets, 0.0, step=101) == 1.0


def test_a_decision_depends_on_seed_position_and_statistic_alone() -> None:
    for name in ("learnable", "thompson"):
        first = [curriculum(name=name).takes(p, PromptStatistic(0.2, 2, 0), 0) for p in range(200)]
        assert first == [curriculum(name=name).takes(p, PromptStatistic(0.2, 2, 0), 0) for p in range(200)]
        assert first != [curriculum(1, name=name).takes(p, PromptStatistic(0.2, 2, 0), 0) for p in range(200)]


def test_a_statistic_is_four_bytes() -> None:
    assert PromptStatistic.unpack(bytes([51, 7, 1, 2])) == PromptStatistic(0.2, 7, (256 + 2) * 16)
    assert PromptStatistic.unpack(b"") == UNSEEN
    assert PromptStatistic.unpack(bytes(4)) == UNSEEN


def test_more_prompts_than_statistics_can_be_kept_of_are_refused() -> None:
    class Endless:
        def __len__(self) -> int:
            return MOST_PROMPTS + 1

        def __getitem__(self, index: int) -> Any:
            raise IndexError

    Mixture([DatasetPart("endless", [Endless()])])
    with pytest.raises(ConfigError, match=r"train has 16,777,217 prompts.* set train\.limit"):
        Mixture([DatasetPart("endless", [Endless()], curriculum=CurriculumConfig(name="band"))])


def test_a_level_has_the_arguments_of_the_dataset_and_its_own() -> None:
    config = minimal_config(
        model={"path": "m"},
        train={"name": "arithmetic", "args": {"seed": 3}, "levels": [{"max": 9}, {"max": 99, "seed": 4}]},
    )
    assert [level.args for level in config.train[0].at_levels()] == [{"seed": 3, "max": 9}, {"seed": 4, "max": 99}]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "easy"}, "train.curriculum.name: 'easy' is not allowed"),
        ({"floor": 0}, "train.curriculum.floor: 0 is not allowed"),
        ({"between": [0.8, 0.2]}, "train.curriculum.between must be a smaller and a larger number from 0 to 1"),
    ],
)
def test_a_mistake_is_one_clear_line(settings: dict[str, Any], message: str) -> None:
    sections = {"model": {"path": "m"}, "reward": {"terms": [{"name": "exact"}]}}
    with pytest.raises(ConfigError, match=message):
        parse_config({**sections, "train": {"name": "arithmetic", "curriculum": settings}})
