"""Runs on disk: found by name, folder or configuration without a broker, and which files in a folder are a run's."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from schemas.errors import ConfigError

if TYPE_CHECKING:
    from schemas.config import TidemillConfig

CONFIG = "config.yaml"
SUMMARY = "summary.json"
LOCK = "up.lock"
RUNS = Path("runs")
FILES = frozenset(
    {
        SUMMARY,
        CONFIG,
        LOCK,
        *("run.png", "metrics.jsonl", "trained.jsonl", "evaluations.jsonl", "control.json", "redis_url"),
        *("samples", "environment.json", "resources.jsonl", "alerts.jsonl"),
        *("model", "batches", "exports", "checkpoints", "weights", "cache", "broker", "logs", "trackers", "profiles"),
        "slurm",
    }
)
"""Names in a run's folder that are ours: docs/operations.md, "Files of a run"."""
_OURS = re.compile(rf"(?:{'|'.join(map(re.escape, sorted(FILES)))})(?:\.\d+)?")
_ASIDE = re.compile(rf"\.(?:{'|'.join(map(re.escape, sorted(FILES)))})\..+")
"""What is being written to one of these names."""
_MARKS = (LOCK, "trained.jsonl", "checkpoints/RUN.json", "checkpoints/LEADER_TERM")


def is_run_name(name: str) -> bool:
    """Whether an entry of a run's folder is ours, a file that was kept aside or is being written included."""
    return bool(_OURS.fullmatch(name) or _ASIDE.fullmatch(name))


def is_run_folder(folder: Path) -> bool:
    """Whether a folder is a run's, or empty, or not there yet."""
    return not folder.is_dir() or not any(folder.iterdir()) or any((folder / mark).exists() for mark in _MARKS)


def named_config(run: str, overrides: Sequence[str] = ()) -> TidemillConfig | None:
    """The configuration, where ``run`` is the YAML file of one and not a run's name or folder; ConfigError."""
    if not run.endswith((".yaml", ".yml")):
        return None
    from schemas.config import load_config

    return load_config(run, overrides)


def config_of(run: str) -> TidemillConfig:
    """The configuration of a run: a YAML file, or the one in effect that ``tidemill up`` left in the run's folder."""
    if (config := named_config(run)) is not None:
        return config
    found = [file for folder in (RUNS / run, Path(run)) if (file := folder / CONFIG).is_file()]
    if not found:
        raise ConfigError(f"no run {run!r}: there is no {RUNS / run / CONFIG}; give its folder or its YAML file")
    from schemas.config import load_config

    # Where it is now, wherever it was made.
    return load_config(found[0], [f"run.folder={json.dumps(str(found[0].parent.resolve()))}"])
