"""When a run is over for a service that nobody supervises."""

from __future__ import annotations

from deploy.services.finished_run import SETTLED_S, FinishedRun

STEPS = 100


def test_a_run_that_finishes_before_the_eyes_of_a_service_is_over_a_moment_later() -> None:
    run = FinishedRun(STEPS)
    assert not run.is_over(None, 0)
    assert not run.is_over(STEPS, 1)
    assert not run.is_over(STEPS, 1 + SETTLED_S / 2)
    assert run.is_over(STEPS, 1 + SETTLED_S)


def test_it_is_over_also_when_its_trainer_was_asked_for_fewer_steps_than_the_service() -> None:
    run = FinishedRun(STEPS)
    run.is_over(None, 0)
    run.is_over(STEPS // 2, 1)
    assert run.is_over(STEPS // 2, 1 + SETTLED_S)


def test_a_service_that_came_before_the_trainer_of_a_run_with_more_steps_waits_for_it() -> None:
    run = FinishedRun(2 * STEPS)
    assert not any(run.is_over(STEPS, now) for now in (0, SETTLED_S, 100 * SETTLED_S))
    run.is_over(None, 200 * SETTLED_S)
    run.is_over(2 * STEPS, 201 * SETTLED_S)
    assert run.is_over(2 * STEPS, 202 * SETTLED_S)


def test_a_run_that_goes_on_at_once_is_not_over() -> None:
    run = FinishedRun(STEPS)
    run.is_over(None, 0)
    run.is_over(STEPS, 1)
    run.is_over(None, 2)
    assert not run.is_over(STEPS, 1 + SETTLED_S)


def test_a_broker_that_ended_with_the_run_changes_nothing_and_another_silent_one_ends_nobody() -> None:
    run = FinishedRun(STEPS)
    run.is_over(None, 0)
    assert not run.is_over_unheard(100 * SETTLED_S)
    run.is_over(STEPS, 100 * SETTLED_S)
    assert run.is_over_unheard(101 * SETTLED_S)
