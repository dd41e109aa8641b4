"""Figures of each dataset of a mixture."""

from __future__ import annotations

import pytest

from consumers.trainer.metrics.dataset_metrics import DatasetMeter


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
    assert meter.take() == {}, "every step counts anew"
