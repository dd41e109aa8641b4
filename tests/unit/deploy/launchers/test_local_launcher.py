"""Which GPUs a service of one machine gets."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from deploy.launchers.local import VISIBLE, Local
from schemas.errors import ConfigError

DEADLINE_S = 30.0


def seen(launcher: Local, role: str, name: str, folder: Path) -> str:
    """The variable as a service finds it."""
    log = folder / f"{name}.log"
    argv = [sys.executable, "-c", f"import os; print(os.environ.get({VISIBLE!r}, 'unset'))"]
    process = launcher.start(argv, name, role, log, {}, "")
    deadline = time.monotonic() + DEADLINE_S
    while process.poll() is None:
        assert time.monotonic() < deadline, f"{name} did not end"
        time.sleep(0.02)
    return log.read_text().strip()


def test_the_trainer_has_the_first_and_each_generator_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    launcher = Local(trainer_gpus=2, generator_gpus=1)
    assert seen(launcher, "trainer", "trainer", tmp_path) == "0,1"
    assert seen(launcher, "generator", "generator-0", tmp_path) == "2"
    assert seen(launcher, "generator", "generator-3", tmp_path) == "5"
    assert seen(launcher, "reward", "reward-0", tmp_path) == "unset"


def test_who_asks_for_nothing_gets_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "4,7")
    assert seen(Local(), "trainer", "trainer", tmp_path) == "4,7"


def test_they_are_dealt_from_those_that_this_process_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "GPU-a,GPU-b,GPU-c")
    launcher = Local(trainer_gpus=1, generator_gpus=2)
    assert seen(launcher, "generator", "generator-0", tmp_path) == "GPU-b,GPU-c"
    with pytest.raises(ConfigError, match="generator-1 would have GPU 5 of the 3 that there are"):
        launcher.start(["true"], "generator-1", "generator", None, {}, "")
