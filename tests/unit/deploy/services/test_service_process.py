"""A service's process: it keeps the memory that it frees, exits when its run is finished, and with its own code."""

import signal
import subprocess
import sys

import pytest

from deploy.services.finished_run import SETTLED_S, FinishedRun

ENDING = """
import atexit, gc, os, sys, threading, time
from deploy.services.process_end import EndAtOnce
ending = EndAtOnce()
atexit.register(print, "registered function")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
class Part:
    def __del__(self): os.write(1, b"taken apart")
part = Part()
with ending:
    {end}
"""
STEPS = 100
READS = """
import resource, sys
from deploy.services.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def read():
    return [bytes(100_000) for _ in range(64)]
read()
began = faults()
for _ in range(20):
    read()
print(faults() - began)
"""


@pytest.mark.parametrize(
    ("end", "code", "error"),
    [
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(6)", 6, ""),
        ("sys.exit('why')", 1, "why"),
        ("raise ValueError('why')", 1, "ValueError: why"),
    ],
)
def test_a_process_ends_with_its_code_after_all_is_done_and_is_not_taken_apart(end: str, code: int, error: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", ENDING.format(end=end)], capture_output=True, text=True, timeout=60, check=False
    )
    assert answer.returncode == code
    assert answer.stdout.split("\n") == ["thread", "registered function", ""]
    assert error in answer.stderr


def test_an_interrupt_ends_a_process_as_ever() -> None:
    command = [sys.executable, "-c", ENDING.format(end="raise KeyboardInterrupt")]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == -signal.SIGINT
    assert "taken apart" in answer.stdout


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


def count_page_faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", READS, how], capture_output=True, text=True, timeout=60, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_messages_read_again_and_again_take_no_new_pages_from_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    assert count_page_faults("default") > 10_000
    assert count_page_faults("keep") < 1_000


def test_a_users_own_setting_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    from deploy.services.allocator import keep_freed_memory

    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert keep_freed_memory() is False
