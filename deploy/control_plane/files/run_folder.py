"""A run as its folder shows it: where it stands, its configuration, its metrics, its checkpoints."""

import re
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from deploy.control_plane.address import address_of
from deploy.control_plane.files.evaluations import read_evaluations
from deploy.control_plane.files.groups import GroupFiles
from deploy.control_plane.files.lines import GrowingFile
from deploy.control_plane.files.resources import ResourceFile, number
from deploy.control_plane.status.series import MetricsSeries
from schemas.control_api.run_folders import CheckpointHead, RunHead, RunMetrics, RunSettings
from schemas.errors import ConfigError
from schemas.metric_names import describe
from schemas.run_folder import (
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    EVALUATIONS,
    LOCK,
    METRICS,
    SUMMARY,
    last_line,
    parse_line,
    read_object,
)
from schemas.urls import hide_password

LATELY_S = 120.0
"""A run of another machine counts as running if its newest file is younger than this."""
MASK = "***"
_SECRET = re.compile(
    r"(^|[._-])(token|secret|password|passwd|(api|access|private|signing)[._-]?key|credentials?|webhook|auth|authorization"
    r"|cookie|dsn)$|(^|\.)(key$|headers(\.|$)|notify\.command$)",
    re.IGNORECASE,
)
_QUERY = re.compile(r"(?<=[?&])([^=&\s]+)=[^&\s]+")
_CHECKPOINT = re.compile(r"step-(\d{8,})-t\d{4,}")
_HOLDER = re.compile(r"process (\d+) on (\S+)")


class RunFolder:
    """A run's folder, with the metrics and groups that were read. Threads hold ``lock`` while they read these."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        """name: that of the folder by default."""
        self.path = path
        self.lock = threading.Lock()
        self.name = name or path.name
        self.groups = GroupFiles(path)
        self.resources = ResourceFile(path)
        self._series = MetricsSeries()
        self._metrics = GrowingFile(path / METRICS)

    @property
    def summary(self) -> dict[str, Any]:
        """Content of summary.json; {} without one."""
        return read_object(self.path / SUMMARY)

    def head(self) -> RunHead | None:
        """Return where the run stands; None when no run has been here."""
        updated = [time_of(self.path / name) for name in (SUMMARY, METRICS, CONFIG, EVALUATIONS)]
        if not any(updated[:3]):
            return None
        summary, last = self.summary, last_line(self.path / METRICS, "step")
        settings = _raw_settings(self.path / CONFIG)
        # Anything may be in a file of this name.
        planned, tags = summary.get("trainer_steps") or settings.get("trainer.steps"), settings.get("run.tags")
        state, cause = run_state(self.path, summary, max(updated))
        evaluations = [one for one in read_evaluations(self.path) if one.mean is not None]
        before = next((one for one in evaluations if one.version == 0), None)
        newest = evaluations[-1] if evaluations else None
        return RunHead(
            name=self.name,
            folder=str(self.path),
            state=state,
            cause=cause,
            step=max(_whole(summary.get("steps")), _whole(last.get("step"))),
            steps=planned if isinstance(planned, int) else None,
            reward=number(last.get("reward/mean")),
            heldout_reward_before=before.mean if before else number(summary.get("reward_before")),
            heldout_reward=newest.mean if newest else number(summary.get("reward_after")),
            accuracy_before=before.accuracy if before else number(summary.get("accuracy_before")),
            accuracy=newest.accuracy if newest else number(summary.get("accuracy_after")),
            heldout_version=newest.version if newest else None,
            wall_s=number(last.get("wall_s")),
            updated=max(updated),
            model=_text(settings.get("model.path")),
            tags=[tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else [],
            notes=_text(settings.get("run.notes")),
            live=address_of(self.path),
        )

    def config(self) -> RunSettings:
        """Return the settings in effect, secrets masked, and what the trainer ran with."""
        # Imported here: it takes long, and the state of a run needs no settings.
        from schemas.config import load_config

        file = self.path / CONFIG
        changed: list[str] = []
        try:
            found = load_config(file, environment={})
            settings = flatten(found.model_dump(mode="json"))
            changed = sorted(flatten(found.model_dump(mode="json", exclude_defaults=True)))
        except ConfigError:
            # Of another version of Tidemill: as it is written.
            settings = _raw_settings(file)
        masked = {name: mask(name, value) for name, value in settings.items()}
        return RunSettings(settings=masked, changed=changed, environment=read_object(self.path / ENVIRONMENT))

    def metrics(self, cursor: int | None, limit: int, names: set[str] | None, newest: bool = False) -> RunMetrics:
        """Return metrics of a page of steps: after the step ``cursor``, or, from the newest back, before it."""
        self._follow()
        found = self._series.history(cursor, limit, newest, names)
        about = {name: text for name in found.names if (text := describe(name))}
        return RunMetrics.of(found, about=about)

    def checkpoints(self) -> list[CheckpointHead]:
        """Return the checkpoints, oldest first; whether one is whole is looked at when it is loaded."""
        found = []
        for path in (self.path / CHECKPOINTS).glob("step-*"):
            named = _CHECKPOINT.fullmatch(path.name)
            if named and path.is_dir() and not path.is_symlink():
                # The trainer, which keeps the newest checkpoints, may delete this one now.
                with suppress(FileNotFoundError):
                    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                    found.append(CheckpointHead(name=path.name, step=int(named[1]), bytes=size, time=time_of(path)))
        return sorted(found, key=lambda one: (one.step, one.name))

    def _follow(self) -> None:
        for begin, line in self._metrics.read():
            if begin < 0:
                self._series = MetricsSeries()
            elif (found := parse_line(line)) is not None:
                self._series.add(found)


def run_state(folder: Path, summary: dict[str, Any], updated: float) -> tuple[str, str]:
    """Return the state of a run and its cause, by its files. updated: when the newest of them changed, Unix seconds."""
    holder = None
    with suppress(OSError):
        holder = _HOLDER.match((folder / LOCK).read_text(encoding="utf-8", errors="replace"))
    ours = holder is not None and holder[2] == socket.gethostname()
    if not summary and holder is not None and ours and psutil.pid_exists(int(holder[1])):
        return "running", ""
    if summary:
        state, _, cause = str(summary.get("exit_reason", "unknown")).partition(": ")
        return state, cause
    if not ours and time.time() - updated < LATELY_S:
        return "running", ""
    return "unknown", "it has no summary.json: it was killed, or runs on another machine"


def mask(name: str, value: Any) -> Any:
    """Return a setting's value without secrets, and without passwords and values of the query in URLs."""
    if _SECRET.search(name) and value is not None:
        return MASK
    if isinstance(value, str) and "://" in value:
        return _QUERY.sub(rf"\1={MASK}", hide_password(value))
    if isinstance(value, list):
        return [mask(name, each) for each in value]
    if isinstance(value, dict):
        return {key: mask(str(key), each) for key, each in value.items()}
    return value


def mask_tree(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings in their sections, each masked by its dotted name."""
    return {
        key: mask_tree(value, f"{prefix}{key}.") if isinstance(value, dict) else mask(f"{prefix}{key}", value)
        for key, value in tree.items()
    }


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings by dotted name; an empty section is a setting of its own."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def time_of(path: Path) -> float:
    """Return when a file changed, Unix seconds; 0 if it does not exist."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _raw_settings(file: Path) -> dict[str, Any]:
    """Return settings as the file has them, by dotted name; {} if it cannot be read."""
    # Imported here: it takes long, and most who ask about a run need no settings.
    import yaml

    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return flatten(found) if isinstance(found, dict) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0
