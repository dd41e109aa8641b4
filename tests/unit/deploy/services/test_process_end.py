"""A process ends with its code after all is done, without taking apart what it has."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

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
