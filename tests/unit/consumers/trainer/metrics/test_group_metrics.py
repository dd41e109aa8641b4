"""Figures of a step's samples that their workflows gave: bounded, whatever these give."""

from __future__ import annotations

import pytest

from consumers.trainer.metrics.group_metrics import LONGEST_NAME, NAMES, GroupMeter, episode_metrics


def test_a_mean_is_over_the_samples_that_have_it() -> None:
    assert episode_metrics([{"calls": 2.0, "cut": 1.0}, {"calls": 4.0}, {}]) == {
        "episode/calls": 3.0,
        "episode/cut": 1.0,
    }
    assert episode_metrics([]) == {}


def test_a_workflow_that_makes_up_names_does_not_flood_trackers() -> None:
    made_up = [{f"prompt {number}/{k}": 1.0 for k in range(10)} | {"zz": 1.0} for number in range(50)]
    found = episode_metrics(made_up)
    assert len(found) == NAMES
    assert "episode/zz" in found, "what most samples have comes first"


def test_a_name_that_is_no_name_and_a_mean_that_is_no_number_are_left_out() -> None:
    assert episode_metrics([{"": 1.0, "a\nb": 1.0, "x" * (LONGEST_NAME + 1): 1.0}]) == {}
    assert episode_metrics([{"large": 1e308}, {"large": 1e308}]) == {"episode/large": 1e308}


def test_prompts_that_are_too_hard_or_too_easy_and_lost_samples_are_counted() -> None:
    meter = GroupMeter()
    meter.add([0.0, 0.0], False)
    meter.add([1.0, 1.0], False)
    meter.add([0.3, 1.3], True, [0.0, 1.0])
    meter.add([0.2, 0.1], True, [0.0, 0.0])
    meter.drop("zero_variance")
    meter.drop("stale")
    meter.lose(["raised", "died"], 1)
    meter.lose(["raised"], 0)
    found = meter.take()
    assert (found["groups/solve_none_fraction"], found["groups/solve_all_fraction"]) == (0.5, 0.25)
    assert found["groups/filtered_fraction"] == 0.25
    assert (found["samples/failed"], found["samples/unscored"]) == (3.0, 1.0)
    assert (found["samples/failed_raised"], found["samples/failed_died"]) == (2.0, 1.0)
    assert found["reward/unfiltered_mean"] == pytest.approx(3.9 / 8)
    assert meter.take()["samples/failed"] == 0.0


def test_groups_that_teach_nothing_are_counted_until_one_teaches_something_or_a_step_is_taken() -> None:
    meter = GroupMeter()
    for reason in ("zero_variance", "stale", "mean_reward"):
        meter.drop(reason)
    assert (meter.in_vain, meter.filtered) == (2, 2), "an old one taught nothing for another reason"
    meter.keep()
    meter.drop("zero_variance")
    assert (meter.in_vain, meter.filtered) == (1, 3)
    meter.take()
    assert (meter.in_vain, meter.filtered) == (0, 0)
