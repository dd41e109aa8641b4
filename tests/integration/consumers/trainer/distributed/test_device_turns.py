"""The trainer's turns on shared GPUs: when it gives them, and what its locks say to generators meanwhile."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.trainer.distributed.device_turns import DeviceTurns, GiveRule
from schemas.errors import InfraError
from schemas.system.device_lock import DeviceLock, SharedGpus

DEADLINE_S = 30.0
TIMES = st.floats(0, 1e4, allow_nan=False)


@given(wait=TIMES, give=TIMES, hold=TIMES, looks=st.integers(1, 50))
def test_a_wait_costs_at_most_twice_what_it_must(wait: float, give: float, hold: float, looks: int) -> None:
    """It must cost the shorter of the wait, in which the GPUs idle, and a hand-over; looking takes its interval."""
    rule = GiveRule(lambda: False)
    rule.gave(give)
    rule.held(hold)
    interval = wait / looks
    given_at = next((look * interval for look in range(looks) if rule.due(look * interval)), None)
    lost = wait if given_at is None else given_at + give + hold
    assert lost <= 2 * min(wait, give + hold) + interval + 1e-6


def test_the_first_wait_gives_at_once_since_no_cost_is_known() -> None:
    assert GiveRule(lambda: False).due(5.0)


def test_each_wait_is_counted_by_itself() -> None:
    rule = GiveRule(lambda: False)
    rule.gave(2.0)
    rule.held(3.0)
    assert [rule.due(now) for now in (10.0, 14.9, 15.0)] == [False, False, True]
    rule.compute()
    assert not rule.due(15.0)


def test_a_hand_over_that_was_slow_by_exception_keeps_no_trainer_from_giving_for_ever() -> None:
    rule, now, waits = GiveRule(lambda: False), 0.0, 0
    rule.gave(1.0)
    rule.held(300.0)
    rule.compute()
    while not rule.due(now) and not rule.due(now + 20.0):
        rule.compute()
        rule.compute()
        now, waits = now + 60.0, waits + 1
    assert 5 < waits < 20
    rule.gave(1.0)
    rule.compute()
    rule.held(4.0)
    assert rule.cost_s == 5.0


@given(st.floats(0, 1e4), st.floats(0, 1e4))
def test_if_nobody_else_generates_the_trainer_gives_at_once(cost: float, now: float) -> None:
    rule = GiveRule(lambda: True)
    rule.gave(cost)
    assert rule.due(now)


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.005)


def turns_of(folder: Path, generators: int = 1, main: bool = True, deadline_s: float = DEADLINE_S) -> DeviceTurns:
    return DeviceTurns(
        SharedGpus(str(folder), [f"generator-{number}" for number in range(generators)]), main, deadline_s
    )


def test_generators_that_come_and_go_count_from_the_next_wait_on(tmp_path: Path) -> None:
    turns, running = turns_of(tmp_path), ["generator-0"]
    turns.generators = lambda: running
    turns.rule.gave(5.0)
    assert turns.rule.due(0.0), "only those that share the GPUs run"
    turns.rule.compute()
    running.append("generator-1")
    assert not turns.rule.due(1.0), "another one works meanwhile"
    running.pop()
    assert not turns.rule.due(2.0)
    turns.rule.compute()
    assert turns.rule.due(3.0)


def lock_of(folder: Path, name: str) -> DeviceLock:
    return DeviceLock(folder / f"{name}.lock")


def test_the_trainer_says_that_it_wants_the_gpus_and_waits_until_each_generator_sleeps(tmp_path: Path) -> None:
    awake = [lock_of(tmp_path, f"generator-{number}") for number in range(2)]
    assert all(lock.try_hold() for lock in awake)
    turns, wanted = turns_of(tmp_path, 2), lock_of(tmp_path, "trainer")
    assert wanted.is_free()
    thread = threading.Thread(target=turns.hold, daemon=True)
    thread.start()
    until(lambda: not wanted.is_free(), "the trainer wants the GPUs")
    awake[0].release()
    until(lambda: not awake[0].is_free(), "the first generator's lock is taken")
    assert not turns.holding
    awake[1].release()
    thread.join(DEADLINE_S)
    assert turns.holding
    assert not any(lock.try_hold() for lock in awake), "no generator wakes while the trainer computes"
    turns.give()
    assert not turns.holding
    assert wanted.is_free()
    assert all(lock.try_hold() for lock in awake)


def test_all_ranks_hold_a_generators_lock_together_and_each_for_itself(tmp_path: Path) -> None:
    ranks = [turns_of(tmp_path, main=number == 0) for number in range(3)]
    for rank in ranks:
        rank.hold()
    ranks[0].give()
    assert lock_of(tmp_path, "trainer").is_free()
    assert not lock_of(tmp_path, "generator-0").try_hold(), "two ranks still have tensors on the GPU"
    ranks[1].give()
    ranks[2].give()
    assert lock_of(tmp_path, "generator-0").is_free()


def test_a_generator_that_never_sleeps_is_named_at_the_deadline(tmp_path: Path) -> None:
    awake = lock_of(tmp_path, "generator-3")
    assert awake.try_hold()
    turns = DeviceTurns(SharedGpus(str(tmp_path), ["generator-3"]), main=True, deadline_s=0.05)
    with pytest.raises(InfraError, match=r"waited 0 s for its GPUs.*generator-3\.lock"):
        turns.hold()
    assert not turns.holding
    turns.give()
    assert lock_of(tmp_path, "trainer").is_free(), "what was taken on the way is free again"


def test_the_files_of_held_locks_stay_new_and_those_of_others_do_not(tmp_path: Path) -> None:
    turns = turns_of(tmp_path)
    turns.hold()
    files = [tmp_path / "trainer.lock", tmp_path / "generator-0.lock"]

    def age() -> None:
        for file in files:
            os.utime(file, (1.0, 1.0))

    age()
    until(lambda: all(file.stat().st_mtime > 1.0 for file in files), "the files are touched")
    turns.give()
    assert turns._toucher is not None
    turns._toucher.touch()
    age()
    turns._toucher.touch()
    assert all(file.stat().st_mtime == 1.0 for file in files)


HOLDER = """
import sys, time
from pathlib import Path
from consumers.trainer.distributed.device_turns import DeviceTurns
from schemas.system.device_lock import SharedGpus
turns = DeviceTurns(SharedGpus(sys.argv[1], ["generator-0"]), main=True)
turns.hold()
print("holds", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_trainer_that_dies_with_the_gpus_leaves_them_to_generators(tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        assert not lock_of(tmp_path, "generator-0").is_free()
        process.send_signal(number)
        process.wait(DEADLINE_S)
        assert lock_of(tmp_path, "generator-0").is_free()
        assert lock_of(tmp_path, "trainer").is_free()
    finally:
        process.kill()
        process.wait()


def test_the_files_of_a_stopped_trainer_grow_old_and_its_end_frees_the_gpus(tmp_path: Path) -> None:
    """A supervisor ends what is stopped: until then the memory is not free, and no generator may wake."""
    (tmp_path / "other").mkdir()
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        process.send_signal(signal.SIGSTOP)
        running = turns_of(tmp_path / "other")
        running.hold()
        files = {"stopped": tmp_path / "generator-0.lock", "runs": tmp_path / "other" / "generator-0.lock"}
        for _ in range(2):
            for file in files.values():
                os.utime(file, (1.0, 1.0))
            until(lambda: files["runs"].stat().st_mtime > 1.0, "the file of one that runs is touched")
        running.give()
        assert files["stopped"].stat().st_mtime == 1.0
        assert not lock_of(tmp_path, "generator-0").is_free()
        process.kill()
        process.wait(DEADLINE_S)
        assert lock_of(tmp_path, "generator-0").is_free()
    finally:
        process.kill()
        process.wait()
