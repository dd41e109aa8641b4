"""A hung engine is told from a busy, an idle and a frozen one."""

from __future__ import annotations

from producers.generator.stall import LOOK_S, Stall


def silences(growths: list[int | None], step_s: float = LOOK_S) -> list[float]:
    stall = Stall()
    return [stall.look(growth, at * step_s) for at, growth in enumerate(growths)]


def test_an_engine_whose_requests_do_not_grow_hangs_for_longer_and_longer():
    assert silences([5, 5, 5]) == [0, LOOK_S, 2 * LOOK_S]


def test_growth_ends_the_silence_also_when_the_number_falls_with_a_finished_request():
    assert silences([5, 5, 6, 6, 2]) == [0, LOOK_S, 0, LOOK_S, 0]


def test_an_idle_or_paused_engine_never_hangs():
    assert silences([5, None, None, 5, 5]) == [0, 0, 0, 0, LOOK_S]


def test_time_in_which_the_whole_process_was_frozen_does_not_count():
    assert max(silences([5, 5], step_s=10_000)) == 2 * LOOK_S
