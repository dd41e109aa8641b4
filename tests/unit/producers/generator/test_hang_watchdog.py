"""A hung engine is told from a busy, an idle and a frozen one."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

from producers.generator.hang_watchdog import CHECK_S, Stall

HUNG = """
import multiprocessing, os, signal, time
from producers.generator.hang_watchdog import end_hung_process

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(300,))
    child.start()
    os.kill(child.pid, signal.SIGSTOP)  # so deep asleep that it can't notice anything
    print(child.pid, flush=True)
    end_hung_process("the engine hangs")
"""


def silences(growths: list[int | None], step_s: float = CHECK_S) -> list[float]:
    stall = Stall()
    return [stall.observe(growth, at * step_s) for at, growth in enumerate(growths)]


def test_an_engine_whose_requests_do_not_grow_hangs_for_longer_and_longer():
    assert silences([5, 5, 5]) == [0, CHECK_S, 2 * CHECK_S]


def test_growth_ends_the_silence_also_when_the_number_falls_with_a_finished_request():
    assert silences([5, 5, 6, 6, 2]) == [0, CHECK_S, 0, CHECK_S, 0]


def test_an_idle_or_paused_engine_never_hangs():
    assert silences([5, None, None, 5, 5]) == [0, 0, 0, 0, CHECK_S]


def test_time_in_which_the_whole_process_was_frozen_does_not_count():
    assert max(silences([5, 5], step_s=10_000)) == 2 * CHECK_S


def test_no_child_outlives_a_process_that_ends_because_of_a_hung_engine():
    done = subprocess.run([sys.executable, "-c", HUNG], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    child = int(done.stdout.split()[0])
    end = time.monotonic() + 30
    while exists(child):
        assert time.monotonic() < end, "the child is still there"
        time.sleep(0.01)


def exists(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
