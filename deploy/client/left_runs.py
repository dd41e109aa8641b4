"""Runs as their folders show them: what one that has ended left on disk, for when no broker has it any more."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deploy.run_files import CONFIG, RUNS
from schemas.config import load_config
from schemas.errors import ConfigError

SUMMARY = "summary.json"
METRICS = "metrics.jsonl"
TAIL = 64 * 1024
"""Bytes at the end of metrics.jsonl in which the newest whole line is looked for."""


@dataclass(frozen=True)
class LeftRun:
    """A run in its folder. state: that of its summary, ``unknown`` without one. updated: Unix time of its newest file.

    steps: those that were wanted. reward: mean of the last step's samples. summary: what summary.json holds.
    """

    name: str
    folder: str
    state: str
    cause: str
    step: int
    steps: int | None
    reward: float | None
    updated: float
    summary: dict[str, Any] = field(default_factory=dict)

    def rows(self) -> list[tuple[str, str]]:
        """The run for people, line by line."""
        unknown = "no broker has this run, and it has no summary.json: it was not ended in order, or runs elsewhere"
        cause = self.cause or (unknown if self.state == "unknown" else "")
        s = self.summary
        lines = [
            ("state", f"{self.state}: {cause}" if cause else self.state),
            ("step", f"{self.step} of {'?' if self.steps is None else self.steps}"),
            ("reward", "-" if self.reward is None else f"{self.reward:.4g} in the last step"),
        ]
        if s.get("accuracy_after") is not None:
            before = s.get("accuracy_before")
            lines.append(
                ("held-out", f"{'-' if before is None else f'{before:.1%}'} before, {s['accuracy_after']:.1%} after")
            )
        if s.get("trajectories") is not None:
            lost, twice = s.get("trajectories_lost"), s.get("trajectories_trained_twice")
            lines.append(("trajectories", f"{s['trajectories']:,}, {lost} lost, {twice} trained twice"))
        return [*lines, ("last change", date(self.updated)), ("folder", self.folder)]

    def to_json(self) -> str:
        """All of it as one line."""
        return json.dumps(asdict(self))


def read_run(folder: Path, name: str | None = None) -> LeftRun | None:
    """The run in ``folder``; None when no run has been there. name: that of the folder by default."""
    files = [file for each in (SUMMARY, METRICS, CONFIG) if (file := folder / each).is_file()]
    if not files:
        return None
    summary, last = _summary(folder / SUMMARY), _last_line(folder / METRICS)
    state, _, cause = str(summary.get("exit_reason", "unknown")).partition(": ")
    reward = last.get("reward/mean")
    return LeftRun(
        name=name or folder.name,
        folder=str(folder),
        state=state,
        cause=cause,
        step=max(_number(summary.get("steps")), _number(last.get("step"))),
        steps=_steps(folder / CONFIG),
        reward=float(reward) if isinstance(reward, int | float) else None,
        updated=max(file.stat().st_mtime for file in files),
        summary=summary,
    )


def read_runs(parent: Path = RUNS) -> Iterator[LeftRun]:
    """All runs in the folders below ``parent``, by name."""
    for folder in sorted(parent.glob("*")) if parent.is_dir() else ():
        found = read_run(folder)
        if found is not None:
            yield found


def date(at: float) -> str:
    """A time for people."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _steps(config: Path) -> int | None:
    """The steps that the run's own configuration wants; None when it is gone, or another version's."""
    try:
        return load_config(config, environment={}).trainer.steps
    except ConfigError:
        return None


def _summary(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _last_line(file: Path) -> dict[str, Any]:
    """The newest whole line that has a step; a crash may have cut the very last one off."""
    try:
        with file.open("rb") as lines:
            lines.seek(max(0, os.fstat(lines.fileno()).st_size - TAIL))
            tail = lines.read().splitlines()
    except OSError:
        return {}
    for text in reversed(tail):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and "step" in line:
            return line
    return {}
