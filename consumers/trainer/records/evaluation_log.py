"""The complete evaluations of a run, in evaluations.jsonl, which outlives the broker's copy of them.

A line is on the disk before the next one is written, and a version's line never changes. A trainer that resumes a run
first reads the file.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from schemas.run_folder import EVALUATIONS, read_lines
from schemas.system.files import LineFile, disk_errors


class EvaluationLog:
    """evaluations.jsonl in a run's folder. lines: what it holds, by version.

    A line has version, n (samples), scored, failed, off_version, mean (reward of the scored samples, null without any),
    accuracy (share of correct samples, null if the configuration does not say which are correct),
    length (mean of their loss tokens, null if unknown), time (of the last score, Unix seconds), wall_s
    (time since the run began) and datasets: the same by label, with accuracy and pass@k, and ``prompts``: how many
    samples of a prompt were scored, how many of them are correct, and how many prompts there are of that kind.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / EVALUATIONS
        self.lines: dict[int, dict[str, Any]] = {}
        self._lines = LineFile(self.file, durable=True)
        self._read = 0
        """Bytes of the file whose lines are known."""
        self._read_lines()

    def add(self, line: Mapping[str, Any]) -> None:
        """Write a version's line durably, unless a trainer has written it before; DiskError if the disk is full."""
        self._read_lines()
        if line["version"] in self.lines:
            return
        with disk_errors(f"cannot write {self.file}"):
            self._lines.append(json.dumps(dict(line)))
        self._read_lines()

    def _read_lines(self) -> None:
        size = self.file.stat().st_size if self.file.is_file() else 0
        if size != self._read:
            self.lines, self._read = read_evaluations(self.file), size


def best_versions(lines: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Return the versions with a mean reward, best first; of equal ones the oldest."""
    means = {version: line["mean"] for version, line in lines.items() if line.get("mean") is not None}
    return sorted(means, key=lambda version: (-means[version], version))


def count_since_best(lines: Mapping[int, Mapping[str, Any]]) -> int:
    """Count the evaluations after that of the best version."""
    best = best_versions(lines)
    return sum(version > best[0] for version in best)


def read_evaluations(file: Path) -> dict[int, dict[str, Any]]:
    """Return the lines of evaluations.jsonl by version, in order; of each version the first complete one."""
    found: dict[int, dict[str, Any]] = {}
    for line in read_lines(file):
        try:
            found.setdefault(int(line["version"]), line)
        except (ValueError, KeyError, TypeError):
            continue
    return dict(sorted(found.items()))
