"""The file of a run's evaluations: one line a version, whatever crashes and starts again in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from consumers.trainer.records.evaluations import EvaluationLog, read_evaluations


def line(version: int, mean: float | None = 0.5) -> dict[str, Any]:
    return {"version": version, "n": 2, "scored": 2, "failed": 0, "off_version": 0, "mean": mean, "time": 7.0}


def test_a_version_has_one_line_for_ever_also_after_a_restart(tmp_path: Path) -> None:
    first = EvaluationLog(tmp_path)
    first.add(line(0))
    first.add(line(0, 0.9))
    second = EvaluationLog(tmp_path)
    second.add(line(0, 0.9))
    second.add(line(8, None))
    assert read_evaluations(second.file) == {0: line(0), 8: line(8, None)} == second.lines
    assert len(second.file.read_text().splitlines()) == 2


def test_a_line_that_a_crash_cut_off_swallows_none_and_is_written_again(tmp_path: Path) -> None:
    log = EvaluationLog(tmp_path)
    log.add(line(0))
    log.add(line(4))
    log.file.write_bytes(log.file.read_bytes()[:-20])
    again = EvaluationLog(tmp_path)
    assert list(again.lines) == [0]
    again.add(line(4))
    again.add(line(8))
    assert read_evaluations(log.file) == {0: line(0), 4: line(4), 8: line(8)}


def test_a_run_without_the_file_has_no_evaluations(tmp_path: Path) -> None:
    assert read_evaluations(tmp_path / "evaluations.jsonl") == {}
