"""Figures of each dataset of a mixture."""

from __future__ import annotations

import pytest

from consumers.trainer.metrics.dataset_metrics import DatasetMeter, curriculum_figures


def test_each_dataset_has_its_own_mean_reward_and_solve_rate() -> None:
    meter = DatasetMeter()
    meter.add("sums", [1.0, 1.0], [True, True])
    meter.add("sums", [1.0, 0.2], [True, False])
    meter.add("code", [0.0, 0.5], [False, False])
    assert meter.take() == pytest.approx(
        {
            "data/sums/groups": 2,
            "data/sums/reward_mean": 0.8,
            "data/sums/solve_rate": 0.75,
            "data/sums/solve_none": 0,
            "data/sums/solve_all": 1,
            "data/code/groups": 1,
            "data/code/reward_mean": 0.25,
            "data/code/solve_rate": 0.0,
            "data/code/solve_none": 1,
            "data/code/solve_all": 0,
        }
    )
    assert meter.take() == {}, "every step has its own counts"


def test_a_level_has_figures_of_its_own() -> None:
    meter = DatasetMeter()
    meter.add("sums", [1.0], [True], level=0)
    meter.add("sums", [0.0], [False], level=2)
    figures = meter.take()
    assert figures["data/sums/solve_rate"] == 0.5
    assert (figures["data/sums/level_0/solve_rate"], figures["data/sums/level_2/solve_rate"]) == (1.0, 0.0)


def test_a_curriculum_is_shown_by_what_it_skips_and_how_prompts_are_solved() -> None:
    statistics = bytes([255, 1, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 128, 2, 0, 0])
    assert curriculum_figures({"skipped": 30, "admitted": 10}, statistics) == {
        "data/skipped_fraction": 0.75,
        "data/prompts_seen": 3,
        "data/prompts_unsolved": 1,
        "data/prompts_solved": 1,
    }
    assert curriculum_figures({"admitted": 10}, b"") == {}
