"""A run whose terminal is closed ends in order, with a checkpoint and a summary."""

import contextlib
import json
import os
import pty
import signal
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import INTERRUPTED_EXIT
from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.up_runs import UpRun


def configuration(folder: Path) -> dict[str, Any]:
    model = make_tiny_model(folder / "model", hidden=32, layers=1)
    return {
        "model": {"path": str(model), "dtype": "float32", "max_length": 64},
        "train": {"name": "arithmetic"},
        "reward": {"terms": [{"name": "exact"}]},
        "sampling": {"n": 2, "max_tokens": 4},
        "generator": {"engine": "scripted", "args": {"token_s": 0.02}, "probe_tolerance": 1e3},
        "trainer": {"steps": 1_000_000, "batch_groups": 2, "threads": 1, "advantage": {"keep_zero_variance": True}},
        "control": {"enabled": False},
    }


@pytest.mark.timeout(300)
def test_a_terminal_that_is_closed_stops_a_run_in_order(tmp_path: Path) -> None:
    """A shell reports the hang-up as well as the kernel: the second signal does not kill the services."""
    terminal, shell = pty.openpty()
    run = UpRun(tmp_path, configuration(tmp_path), output=shell, terminal=True)
    os.close(shell)
    os.set_blocking(terminal, False)

    def three_steps() -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(terminal, 1 << 16)
        return run.steps() >= 3

    run.wait_until(three_steps, "three steps")
    os.close(terminal)
    run.process.send_signal(signal.SIGHUP)
    assert run.process.wait(120) == INTERRUPTED_EXIT
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["exit_reason"] == "stopped"
    assert list((run.folder / "checkpoints").glob("step-*")), "the steps since the last checkpoint are kept"
