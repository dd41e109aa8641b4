"""The options of tests/support/selection.py, which continuous integration takes a part of the matrices with."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
FILES = [f"tests/unit/schemas/test_{name}.py" for name in ("booleans", "errors")]
CHAOS = "tests/e2e/system/test_chaos.py"


def pytest_prints(*arguments: str, **environment: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_tests_for_which_there_is_no_time_are_skipped_and_named() -> None:
    lines = pytest_prints("--minutes", "0", *FILES)
    assert any("tests not begun within --minutes" in line for line in lines)
    assert {line.split()[-1] for line in lines if line.endswith(".py")} == {*FILES}
    assert "passed" not in lines[-1]


def test_files_come_in_the_order_of_a_seed_and_chaos_before_them() -> None:
    """Read without tests/conftest.py and plugins, which import what no test here needs."""
    orders = set()
    alone = ("--noconftest", "-p", "tests.support.selection", "-p", "pytest_timeout")
    for seed in range(3):
        lines = pytest_prints(
            *alone, "--collect-only", "--shuffle", str(seed), *FILES, CHAOS, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"
        )
        order = tuple(dict.fromkeys(line.split("::")[0] for line in lines if "::" in line))
        assert order[0] == CHAOS
        assert {*order[1:]} == {*FILES}
        orders.add(order)
    assert len(orders) == 2
