"""A run's folder: the names of its files, how to find it, and how to read its files of JSON lines."""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schemas.errors import ConfigError

if TYPE_CHECKING:
    from schemas.config import TidemillConfig

RUNS = Path("runs")
"""Folder of the runs' folders, unless a configuration names another."""

CONFIG = "config.yaml"
"""The settings in effect."""
LOCK = "up.lock"
SUMMARY = "summary.json"
PLOT = "run.png"
METRICS = "metrics.jsonl"
"""A line for each optimizer step."""
TRAINED = "trained.jsonl"
"""The samples of each step."""
EVALUATIONS = "evaluations.jsonl"
SAMPLES = "samples"
"""Folder of prompts with their samples, by step and by evaluation."""
RESOURCES = "resources.jsonl"
ALERTS = "alerts.jsonl"
ENVIRONMENT = "environment.json"
"""Machine and versions that the trainer ran with."""
ADDRESS = "control.json"
"""URL of the control plane, for those on the same machine."""
CONTROL_TOKEN = "control_token"
"""Token that a control plane on loopback made for itself; only the run's owner may read it."""
CHECKPOINTS = "checkpoints"
DEVICES = "devices"
"""Folder of locks on GPUs that the trainer shares with generators: schemas/system/device_lock.py."""
LOGS = "logs"
NODES = "nodes"
"""Folder of what `tidemill node` has started: the settings in effect, by machine."""
PYTHON = "python"
"""Folder of what Python objects became, before the run starts in its folder: functions, data, the configuration."""
FILES = frozenset(
    {
        *(CONFIG, LOCK, SUMMARY, PLOT, METRICS, TRAINED, EVALUATIONS, SAMPLES, RESOURCES, ALERTS, ENVIRONMENT),
        *(ADDRESS, CONTROL_TOKEN, CHECKPOINTS, DEVICES, LOGS, NODES, PYTHON),
        *("redis_url", "model", "batches", "exports", "replay_buffer", "weights", "cache", "broker"),
        *("trackers", "profiles", "slurm", "kubernetes"),
    }
)
"""Names in a run's folder that are ours: docs/operations.md, "Files of a run"."""
_OURS = re.compile(rf"(?:{'|'.join(map(re.escape, sorted(FILES)))})(?:\.\d+)?")
_ASIDE = re.compile(rf"\.(?:{'|'.join(map(re.escape, sorted(FILES)))})\..+")
"""A file that is being written to one of these names."""
_MARKS = (LOCK, TRAINED, f"{CHECKPOINTS}/RUN.json", f"{CHECKPOINTS}/LEADER_TERM")
TAIL = 64 * 1024
"""Bytes at the end of a file in which ``last_line`` looks."""


def is_run_name(name: str) -> bool:
    """Return whether an entry of a run's folder is ours, also one that was kept aside or is being written."""
    return bool(_OURS.fullmatch(name) or _ASIDE.fullmatch(name))


def is_run_folder(folder: Path) -> bool:
    """Return whether a folder is a run's, is empty, or does not exist."""
    if not folder.is_dir() or all(path.name == PYTHON for path in folder.iterdir()):
        return True
    return any((folder / mark).exists() for mark in _MARKS)


def named_config(run: str, overrides: Sequence[str] = ()) -> TidemillConfig | None:
    """Load the configuration if ``run`` is a YAML file, and return None for a run's name or folder. ConfigError."""
    if not run.endswith((".yaml", ".yml")):
        return None
    from schemas.config import load_config

    return load_config(run, overrides)


def find_folder(run: str) -> Path:
    """Return the folder of a run, by its name under runs/, its folder, or its configuration; it may not exist."""
    config = named_config(run)
    return config.folder if config else next((each for each in (RUNS / run, Path(run)) if each.is_dir()), RUNS / run)


def config_of(run: str) -> TidemillConfig:
    """Load the configuration of a run: a YAML file, or the one that ``tidemill up`` wrote into the run's folder."""
    if (config := named_config(run)) is not None:
        return config
    file = find_folder(run) / CONFIG
    if not file.is_file():
        raise ConfigError(f"no run {run!r}: there is no {RUNS / run / CONFIG}; give its folder or its YAML file")
    from schemas.config import load_config

    # The folder may have been moved since.
    return load_config(file, [f"run.folder={json.dumps(str(file.parent.resolve()))}"])


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None for anything else, such as a line that a crash has cut off."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


@dataclass(frozen=True)
class StoredLines:
    """The JSON objects of a file of lines, read again by each loop, one at a time; none if there is no such file."""

    file: Path

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            with self.file.open("rb") as lines:
                for line in lines:
                    if (found := parse_line(line)) is not None:
                        yield found
        except OSError:
            return


def as_text(value: Any) -> str:
    """Return a value of users' data as a text to read: in JSON, or as Python writes it if JSON has no such keys."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, default=str)
    except (TypeError, ValueError):
        return repr(value)
    except RecursionError:
        return f"{type(value).__name__} that is nested too deeply"


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file of lines, without unreadable lines; [] if there is no such file."""
    return list(StoredLines(file))


def last_line(file: Path, name: str) -> dict[str, Any]:
    """Return the newest whole line with the entry ``name``, near the end of the file; {} without one."""
    try:
        with file.open("rb") as lines:
            lines.seek(max(0, os.fstat(lines.fileno()).st_size - TAIL))
            tail = lines.read().splitlines()
    except OSError:
        return {}
    return next((found for line in reversed(tail) if (found := parse_line(line)) is not None and name in found), {})


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object of a whole file; {} if there is none."""
    try:
        return parse_line(file.read_bytes()) or {}
    except OSError:
        return {}


def surviving_lines(lines: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the lines of the surviving weights, by step. ``lines`` are looped over twice, and never kept.

    A trainer that resumed goes back to its checkpoint's step: older lines of that step and later ones do not count.
    """
    kept = array("q")
    steps = array("q")
    newest = 0
    for number, line in enumerate(lines):
        leader_term = int(str(line.get("leader_term", newest)).partition("-")[0])
        if leader_term < newest:
            # Written by a trainer that had been replaced and did not know it yet.
            continue
        newest = leader_term
        step: int = line["resumed"] if "resumed" in line else line["step"]
        while steps and steps[-1] >= step:
            steps.pop()
            kept.pop()
        if "resumed" not in line:
            steps.append(step)
            kept.append(number)
    survivors = iter(kept)
    following = next(survivors, None)
    for number, line in enumerate(lines):
        if number == following:
            yield line
            following = next(survivors, None)
