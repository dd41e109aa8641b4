"""A finished run is not started again by mistake, and goes on when it is given more steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.run.up import _finished


@pytest.mark.parametrize(
    ("reason", "done", "asked", "finished"),
    [("finished", 360, 360, True), ("finished", 360, 100, True), ("finished", 360, 361, False), ("asked", 9, 9, False)],
)
def test_a_run_is_finished_when_all_its_steps_are_done(
    tmp_path: Path, reason: str, done: int, asked: int, finished: bool
) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"exit_reason": reason, "steps": done}))
    assert _finished(tmp_path, asked) is finished


def test_a_summary_that_was_cut_short_finishes_nothing(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{")
    assert not _finished(tmp_path, 1)
