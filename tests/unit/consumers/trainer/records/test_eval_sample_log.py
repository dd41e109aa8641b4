"""samples/ of evaluations: a file for each that is complete, whatever comes late, twice or in parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from consumers.trainer.records import evaluation_samples as eval_sample_log
from consumers.trainer.records.evaluation_samples import EvalSampleLog


class Stream:
    """Entries as the broker gives them; written: up to which the log said that it needs none."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, dict[str, Any]]] = []
        self.written = ""

    def add(self, version: int, index: int, sample: int) -> None:
        line = {"version": version, "index": index, "prompt": f"p{index}", "data": {}}
        self.entries.append((f"{len(self.entries) + 1}-0", {**line, "sample": {"sample": sample, "reward": 1.0}}))

    def take(self, after: str, written: str) -> list[tuple[str, dict[str, Any]]]:
        self.written = written or self.written
        return [entry for entry in self.entries if int(entry[0][:-2]) > int(after[:-2])][:2]


def numbers(folder: Path, version: int) -> list[tuple[int, list[int]]]:
    lines = (folder / "samples" / f"eval-{version:08d}.jsonl").read_text().splitlines()
    return [(line["index"], [one["sample"] for one in line["samples"]]) for line in map(json.loads, lines)]


def test_a_file_is_written_when_its_evaluation_is_complete(tmp_path: Path) -> None:
    stream = Stream()
    log = EvalSampleLog(tmp_path, stream.take)
    for sample in (1, 0, 1):
        stream.add(0, 5, sample)
    stream.add(4, 1, 0)
    log.write([])
    assert not (tmp_path / "samples").exists()
    stream.add(0, 2, 0)
    log.write([0])
    assert numbers(tmp_path, 0) == [(2, [0]), (5, [0, 1])]
    log.write([0])
    assert stream.written == "", "version 4 is not complete, and would be lost with this trainer"
    log.write([0, 4])
    log.write([0, 4])
    assert stream.written == "5-0"


def test_a_trainer_that_starts_again_writes_what_the_one_before_did_not(tmp_path: Path) -> None:
    stream = Stream()
    stream.add(0, 0, 0)
    EvalSampleLog(tmp_path, stream.take).write([0])
    stream.add(0, 1, 0)
    stream.add(3, 0, 0)
    EvalSampleLog(tmp_path, stream.take).write([0, 3])
    assert (numbers(tmp_path, 0), numbers(tmp_path, 3)) == ([(0, [0])], [(0, [0])])


def test_the_first_and_the_newest_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval_sample_log, "KEEP", 3)
    stream = Stream()
    log = EvalSampleLog(tmp_path, stream.take)
    for version in range(6):
        stream.add(version, 0, 0)
        log.write(range(6))
    kept = sorted(int(file.stem[5:]) for file in (tmp_path / "samples").glob("*"))
    assert kept == [0, 4, 5]
