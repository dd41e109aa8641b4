"""Phases, what is in none of them, and their sum, by a clock that the test moves."""

from __future__ import annotations

from consumers.trainer.metrics.timing import StepTimer


def test_phases_and_the_rest_add_up_to_what_passed() -> None:
    now = 10.0
    clock = StepTimer(lambda: now)
    with clock.phase("wait"):
        now += 2.0
    now += 0.5
    for _ in range(2):
        with clock.phase("train"):
            now += 3.0
    clock.split("train", {"forward": 1.0, "backward": 4.0})
    assert clock.lap() == {"wait": 2.0, "train": 1.0, "forward": 1.0, "backward": 4.0, "other": 0.5, "total": 8.5}


def test_the_time_of_a_phase_inside_another_counts_once() -> None:
    now = 0.0
    clock = StepTimer(lambda: now)
    with clock.phase("optimizer"):
        now += 1.0
        for _ in range(2):
            with clock.phase("forward"):
                now += 2.0
        now += 0.5
    with clock.phase("critic"):
        now += 3.0
    assert clock.lap() == {"optimizer": 1.5, "forward": 4.0, "critic": 3.0, "other": 0.0, "total": 8.5}


def test_a_lap_begins_where_the_last_one_ended() -> None:
    now = 0.0
    clock = StepTimer(lambda: now)
    now += 1.0
    assert clock.lap() == {"other": 1.0, "total": 1.0}
    now += 2.0
    assert clock.lap() == {"other": 2.0, "total": 2.0}
