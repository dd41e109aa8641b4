"""Which groups a step takes: admission order, the look-ahead window, and the staleness bound that follows."""

import random

from hypothesis import given
from hypothesis import strategies as st

from broker.flow.pipeline import ScoredSample, Slot
from consumers.trainer.group_buffer import FailureStreak, GroupBuffer
from schemas.messages import Score


def outcome(task_id: int, sample: int, size: int = 2, entry: bytes = b"1-1") -> ScoredSample:
    return ScoredSample(entry, task_id, sample, size, b"2-2", Score(reward=1.0))


def slots(*task_ids: int) -> list[Slot]:
    return [Slot(task_id, task_id) for task_id in task_ids]


def test_a_group_is_complete_with_its_last_sample_and_only_once() -> None:
    buffer = GroupBuffer(window=1)
    assert not buffer.add(outcome(0, 1))
    assert not buffer.add(outcome(0, 1, entry=b"9-9"))
    assert not buffer.is_complete(0)
    assert buffer.add(outcome(0, 0))
    taken = buffer.take(0)
    assert [(item.sample, item.scored_id) for item in taken] == [(0, b"1-1"), (1, b"1-1"), (1, b"9-9")]
    assert [item.trajectory_id for item in taken] == [b"2-2", b"2-2", None], "trained once"
    assert not buffer.is_complete(0)


def test_strict_order_waits_for_the_oldest_group() -> None:
    buffer = GroupBuffer(window=1)
    for sample in (0, 1):
        buffer.add(outcome(8, sample))
    assert buffer.choose(slots(7, 8)) is None
    assert "prompt group, 7, has no sample" in buffer.describe_missing(slots(7, 8))
    for sample in (0, 1):
        buffer.add(outcome(7, sample))
    assert buffer.choose(slots(7, 8)) == Slot(7, 7)


def test_a_window_lets_finished_groups_overtake_so_far_and_no_further() -> None:
    buffer = GroupBuffer(window=3)
    for task_id in (5, 6):
        for sample in (0, 1):
            buffer.add(outcome(task_id, sample))
    assert buffer.choose(slots(3, 4, 5, 6)) == Slot(5, 5)
    assert buffer.choose(slots(2, 5, 6)) is None


@given(
    batch=st.integers(1, 5),
    staleness=st.integers(0, 4),
    window=st.integers(1, 6),
    seed=st.integers(0, 10_000),
)
def test_the_bound_holds_whatever_order_groups_finish_in(batch: int, staleness: int, window: int, seed: int) -> None:
    """With slots = (staleness + 1) * batch - (window - 1), nothing admitted at v is trained after v + staleness."""
    capacity = (staleness + 1) * batch - (window - 1)
    if capacity < batch:
        return
    rng = random.Random(seed)
    buffer = GroupBuffer(window)
    admitted_at: dict[int, int] = {}
    active: list[int] = []
    running: list[int] = []
    version, taken, cursor = 0, 0, 0
    for _ in range(300):
        while len(active) + taken < capacity:
            admitted_at[cursor] = version
            active.append(cursor)
            running.append(cursor)
            cursor += 1
        if running:
            buffer.add(outcome(running.pop(rng.randrange(len(running))), 0, size=1))
        while taken < batch and (slot := buffer.choose(slots(*active))) is not None:
            task_id = slot.task_id
            active.remove(task_id)
            buffer.take(task_id)
            taken += 1
            assert version - admitted_at[task_id] <= staleness
        if taken == batch:
            version, taken = version + 1, 0
    assert version > 0


def test_groups_that_fail_one_after_another_are_a_streak() -> None:
    streak = FailureStreak(limit=3)
    for task_id in range(3):
        assert streak.find([task_id]) is None
        streak.failed(task_id, f"reason {task_id}")
    assert streak.find([3, 4]) == "3 prompt groups in a row failed, the last: reason 2"


def test_a_group_that_succeeded_ends_a_streak_in_whatever_order_groups_end() -> None:
    streak = FailureStreak(limit=3)
    for task_id in (5, 0, 1, 3, 4):
        streak.failed(task_id, "no")
    streak.succeeded(2)
    assert streak.find([]) == "3 prompt groups in a row failed, the last: no"
    again = FailureStreak(limit=4)
    for task_id in (5, 0, 1, 3, 4):
        again.failed(task_id, "no")
    again.succeeded(2)
    assert again.find([]) is None


def test_groups_that_fail_at_once_between_slow_ones_are_no_streak() -> None:
    streak = FailureStreak(limit=3)
    for task_id in range(0, 1000, 2):
        streak.failed(task_id, "no")
        assert streak.find(range(1, task_id + 2, 2)) is None


def test_what_failed_last_of_a_group_counts_and_what_nobody_saw_does_not() -> None:
    streak = FailureStreak(limit=3)
    for task_id in (0, 7, 9):
        streak.succeeded(task_id)
        assert streak.find([]) is None
        streak.failed(task_id, "no tokens")
    assert streak.find([8]) is None
    streak.failed(9, "no tokens")
    assert streak.find([10]) == "3 prompt groups in a row failed, the last: no tokens"


def test_a_failed_group_that_is_made_again_is_in_no_streak_until_it_fails_again() -> None:
    streak = FailureStreak(limit=3)
    streak.failed(0, "no")
    streak.failed(1, "no")
    assert streak.find([2]) is None
    streak.failed(2, "no")
    assert streak.find([0, 1]) is None
    streak.failed(0, "no")
    streak.failed(1, "still no")
    assert streak.find([3]) == "3 prompt groups in a row failed, the last: no"


def test_a_long_run_keeps_few_ends_in_mind() -> None:
    streak = FailureStreak(limit=3)
    for task_id in range(10_000):
        streak.failed(task_id, "no") if task_id % 3 else streak.succeeded(task_id)
        assert streak.find([task_id + 1]) is None
    assert len(streak) < 20


def test_a_run_in_which_nothing_fails_keeps_few_ends_in_mind() -> None:
    streak = FailureStreak(limit=3)
    for task_id in range(1000):
        streak.succeeded(task_id)
        assert streak.find([]) is None
    assert len(streak) <= 24
    # The newest are kept: they end the streak.
    for task_id in (996, 998, 1000):
        streak.failed(task_id, "no reward")
    assert streak.find([]) is None
