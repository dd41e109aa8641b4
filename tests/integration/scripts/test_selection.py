"""How tests are run: coroutines as well, and with the options of tests/support/selection.py a part of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("options", [[], ["-p", "no:anyio"]], ids=["with the plugin", "without it"])
def test_a_test_that_is_a_coroutine_is_never_skipped(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "test_planted.py").write_text("async def test_fails():\n    raise AssertionError\n", encoding="utf-8")
    settings = ["-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *settings, *options, tmp_path / "test_planted.py"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert found.returncode == 1
    assert "1 failed" in found.stdout.splitlines()[-1]
