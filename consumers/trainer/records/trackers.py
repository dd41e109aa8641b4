"""Metrics to TensorBoard, Weights & Biases and whatever else accelerate can log to, beside metrics.jsonl.

Each step is sent once: if it is trained again after a crash, it is not sent again, so no step has two values. If a
tracker fails during the run, whatever it raises, or hangs, it is dropped with a warning; the file has everything. Steps
do not wait for trackers.
"""

from __future__ import annotations

import copy
import difflib
import functools
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import structlog

from consumers.trainer.records.tracker_thread import LONG_DEADLINE_S, TrackerThread
from schemas.errors import ConfigError
from schemas.messages import Trajectory
from schemas.plugins import load
from schemas.run_folder import METRICS, StoredLines

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker

    from consumers.trainer.records.samples import Terms
    from schemas.config import TidemillConfig

_NAMES = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")
MODULES = {name: [name, "tensorboardX"] if name == "tensorboard" else [name] for name in _NAMES}
"""accelerate's trackers, and the modules that each can be imported from; the first is also its name for pip."""

VARIABLES = {
    "clearml": "CLEARML_PROJECT",
    "comet_ml": "COMET_PROJECT_NAME",
    "mlflow": "MLFLOW_EXPERIMENT_NAME",
    "wandb": "WANDB_PROJECT",
}
"""The trackers' own variables for the project."""

COLUMNS = ["step", "prompt", "completion", "reward", "terms", "tokens", "finish"]
"""Columns of the table of completions; the terms of the reward are one JSON object."""
SETTING = "trainer.trackers"
FOLDER = "trackers"
ERROR_DEADLINE_S = 5.0
"""Seconds for the unsent rest if the trainer ends with an error; its restart waits for that."""

Notify: TypeAlias = Callable[[str, Literal["info", "warning", "error"], str], None]
"""Reports an event through the broker: its name, its level, and the text."""

log = structlog.get_logger()


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for a tracker that is unknown or not installed. Imports none of them."""
    for name in names:
        if ":" in name:
            continue
        if name not in MODULES:
            close = difflib.get_close_matches(name, MODULES, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ConfigError(
                f"unknown {SETTING} {name!r}{hint}: one of {', '.join(MODULES)}, or your own as module:name"
            )
        if not any(find_spec(module) for module in MODULES[name]):
            raise ConfigError(f"{SETTING} {name!r} is not installed: pip install {MODULES[name][0]}")


class Trackers:
    """The trackers of a run, started again by every trainer process that resumes it; rank 0 has them."""

    def __init__(self, config: TidemillConfig, accelerator: Accelerator, notify: Notify) -> None:
        """Start the trackers. One that can't start is a ConfigError in a new run, and is dropped in a resumed one."""
        self._notify = notify
        self._sent = 0
        self._trackers: list[tuple[GeneralTracker, TrackerThread]] = []
        names = list(dict.fromkeys(config.trainer.trackers))
        if not names:
            return
        check_trackers(names)
        own = {name: load(name, SETTING, config.base) for name in names if ":" in name}
        self._sent = _last_step(config.folder / METRICS)
        for name in names:
            thread = TrackerThread(name)
            started: list[GeneralTracker] = []

            def start(name: str = name, started: list[GeneralTracker] = started) -> None:
                started += _start(config, copy.copy(accelerator), name, own.get(name), resumed=self._sent > 0)

            thread.put(start)
            thread.wait(LONG_DEADLINE_S)
            if reason := thread.problem:
                thread.end()
                if not self._sent:
                    raise ConfigError(f"{SETTING} cannot start: {reason}") from thread.error
                self._give_up(name, "did not start", reason)
            else:
                self._trackers += [(tracker, thread) for tracker in started]

    def log(self, line: Mapping[str, Any]) -> None:
        """Send the metrics of a step, a line of metrics.jsonl; a histogram becomes a metric for each entry."""
        step = int(line["step"])
        if step <= self._sent:
            return
        self._sent = step
        figures = {name: value for name, value in line.items() if isinstance(value, int | float)}
        for name, entries in line.items():
            if isinstance(entries, Mapping):
                figures |= {f"{name}/{entry}": value for entry, value in entries.items()}
        self._each(lambda tracker: tracker.log(dict(figures), step=step))

    def log_evaluation(self, step: int, figures: Mapping[str, Any]) -> None:
        """Send the metrics of an evaluation that became complete after ``step``; call it once for each."""
        given, at = dict(figures), max(step, self._sent)
        self._each(lambda tracker: tracker.log(dict(given), step=at))

    def log_completions(self, step: int, samples: Sequence[tuple[Trajectory, float]], terms: Terms) -> None:
        """Send samples with their rewards and the terms of these as a table, to trackers that have tables."""
        rows = []
        for sample, reward in samples:
            parts = json.dumps(dict(terms.get((sample.task_id, sample.sample), {})))
            tokens = int(sample.loss_mask.numpy().sum())
            rows.append([step, sample.prompt, sample.completion, reward, parts, tokens, sample.finish])
        at = max(step, self._sent)

        def show(tracker: Any) -> None:
            if callable(getattr(tracker, "log_table", None)):
                tracker.log_table("completions", columns=COLUMNS, data=rows, step=at)

        self._each(show)

    def _each(self, send: Callable[[GeneralTracker], None]) -> None:
        for tracker, thread in self._trackers:
            if not thread.problem:
                thread.put(functools.partial(send, tracker))
        self._drop_failed("failed")

    def _drop_failed(self, what: str) -> None:
        for tracker, thread in [*self._trackers]:
            if reason := thread.problem:
                thread.end()
                self._trackers.remove((tracker, thread))
                self._give_up(tracker.name, what, reason)

    def flush(self) -> None:
        """Give the trackers a moment to send the rest, if an error ends the process; does nothing after ``close``."""
        self._wait(ERROR_DEADLINE_S)
        self._drop_failed("failed")

    def close(self) -> None:
        """Send the rest, but not by accelerate's own call, which also ends the process group."""
        self._drop_failed("failed")
        for tracker, thread in self._trackers:
            thread.put(tracker.finish)
        self._wait(LONG_DEADLINE_S)
        self._drop_failed("did not send its last metrics")
        for _, thread in self._trackers:
            thread.end()
        self._trackers.clear()

    def _wait(self, deadline_s: float) -> None:
        end = time.monotonic() + deadline_s
        for _, thread in self._trackers:
            thread.wait(max(0.0, end - time.monotonic()))

    def _give_up(self, name: str, what: str, reason: str) -> None:
        log.warning("a tracker is dropped", tracker=name, what=what, error=reason)
        self._notify("tracker", "warning", f"tracker {name} {what} and gets nothing more: {reason}")


def _start(
    config: TidemillConfig, accelerator: Accelerator, name: str, own: Any, *, resumed: bool
) -> list[GeneralTracker]:
    """Start one tracker through a copy of our accelerator. own: class of a user's tracker, None for a known one."""
    folder = config.folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    accelerator.project_configuration.set_directories(str(folder))
    accelerator.trackers = []
    accelerator.log_with = [own(config.run.name, str(folder)) if own is not None else name]
    title, arguments = listed_as(config, name, folder, resumed=resumed)
    accelerator.init_trackers(
        title, config=None if resumed else _flat(config.model_dump(mode="json")), init_kwargs={name: arguments}
    )
    return list(accelerator.trackers)


def listed_as(config: TidemillConfig, name: str, folder: Path, *, resumed: bool) -> tuple[str, dict[str, Any]]:
    """Return what accelerate passes a tracker: the project, or a title if it has none, and arguments of its own."""
    given = config.trainer.tracking
    run = given.name or config.run.name
    project = given.project or os.environ.get(VARIABLES.get(name, ""), "tidemill")
    group, tags, notes = given.group, config.run.tags, config.run.notes
    match name:
        case "wandb":
            same = {"id": _identity(folder), "resume": "allow", "dir": str(folder)}
            return project, {**same, "name": run, "group": group, "tags": tags, "notes": notes}
        case "trackio":
            return project, {"name": run, "group": group, "resume": "allow" if resumed else "never"}
        case "swanlab":
            return project, {"name": run, "group": group, "tags": tags, "description": notes}
        case "clearml":
            return project, {"task_name": run, "tags": tags}
        case "mlflow":
            labels = {"group": group} if group else {}
            labels |= dict.fromkeys(tags, "true")
            return project, {"run_name": run, "tags": labels, "description": notes}
        case "aim":
            return run, {"experiment": project}
        case "comet_ml":
            return project, {}
    return run, {}


def _last_step(file: Path) -> int:
    steps = (line.get("step") for line in StoredLines(file))
    return max((step for step in steps if isinstance(step, int)), default=0)


def _identity(folder: Path) -> str:
    """Return the id by which a service resumes this run; a new run has a new folder."""
    file = folder / "id"
    if not file.is_file():
        file.write_text(secrets.token_hex(8), encoding="utf-8")
    return file.read_text(encoding="utf-8")


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, bool | str | int | float]:
    """Flatten to ``{"trainer.steps": 5, ...}``, without the broker's address, which may hold a password."""
    flat: dict[str, bool | str | int | float] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if name == "broker.url":
            continue
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{name}.")
        else:
            flat[name] = value if isinstance(value, bool | str | int | float) else json.dumps(value)
    return flat
