"""What the curricula take: a share of positions by what is known of their prompt, the same on every machine."""

from __future__ import annotations

from typing import Any

import pytest

from producers.datasets.curriculum import MOST_PROMPTS, Curriculum, PromptStatistic
from producers.datasets.mixture import Mixture, Part
from schemas.config import CurriculumConfig, parse_config
from schemas.errors import ConfigError

UNSEEN = PromptStatistic(0.0, 0, 0)


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
def test_the_share_that_is_taken_follows_the_solve_rate(
    settings: dict[str, Any], solved: float, expected: float
) -> None:
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

    Mixture([Part("endless", [Endless()])])
    with pytest.raises(ConfigError, match=r"train has 16,777,217 prompts.* set train\.limit"):
        Mixture([Part("endless", [Endless()], curriculum=CurriculumConfig(name="band"))])


def test_a_level_has_the_arguments_of_the_dataset_and_its_own() -> None:
    config = parse_config(
        {
            "model": {"path": "m"},
            "train": {"name": "arithmetic", "args": {"seed": 3}, "levels": [{"max": 9}, {"max": 99, "seed": 4}]},
            "reward": {"terms": [{"name": "exact"}]},
        }
    )
    assert [level.args for level in config.train[0].at_levels()] == [{"seed": 3, "max": 9}, {"seed": 4, "max": 99}]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "easy"}, "train.curriculum.name: 'easy' is not allowed"),
        ({"floor": 0}, "train.curriculum.floor: 0 is not allowed"),
        ({"between": [0.8, 0.2]}, "train.curriculum.between needs a smaller and a larger number from 0 to 1"),
    ],
)
def test_a_mistake_is_one_clear_line(settings: dict[str, Any], message: str) -> None:
    sections = {"model": {"path": "m"}, "reward": {"terms": [{"name": "exact"}]}}
    with pytest.raises(ConfigError, match=message):
        parse_config({**sections, "train": {"name": "arithmetic", "curriculum": settings}})
