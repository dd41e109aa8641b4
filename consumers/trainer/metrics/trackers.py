"""Metrics to TensorBoard, Weights & Biases and whatever else accelerate can log to, beside metrics.jsonl.

Each step is sent once: one that is trained again after a crash is not, so no step has two values. A tracker that fails
while the run goes on is given up with a warning; the file has everything.
"""

from __future__ import annotations

import difflib
import json
import secrets
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from schemas.errors import ConfigError
from schemas.plugins import load

if TYPE_CHECKING:
    from accelerate import Accelerator

    from schemas.config import TidemillConfig

MODULES = {
    "aim": ["aim"],
    "clearml": ["clearml"],
    "comet_ml": ["comet_ml"],
    "dvclive": ["dvclive"],
    "mlflow": ["mlflow"],
    "swanlab": ["swanlab"],
    "tensorboard": ["tensorboard", "tensorboardX"],
    "trackio": ["trackio"],
    "wandb": ["wandb"],
}
"""accelerate's trackers, and what each can be imported from; the first is also what pip calls it."""

SETTING = "trainer.trackers"
FOLDER = "trackers"

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
    """The trackers of a run, started anew by every trainer process that goes on with it. Rank 0 has them."""

    def __init__(self, config: TidemillConfig, accelerator: Accelerator) -> None:
        """Start the trackers; ConfigError if a tracker cannot start."""
        self._accelerator = accelerator
        self._sent = 0
        if not config.trainer.trackers:
            accelerator.trackers = []
            return
        folder = config.folder / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self._sent = _last_step(config.folder / "metrics.jsonl")
        self._start(config, folder)

    def log(self, line: Mapping[str, Any]) -> None:
        """The figures of a finished step, a line of metrics.jsonl; those that are no numbers are left out."""
        step = int(line["step"])
        if step <= self._sent:
            return
        self._sent = step
        figures = {name: value for name, value in line.items() if isinstance(value, int | float)}
        for tracker in [*self._accelerator.trackers]:
            try:
                tracker.log(figures, step=step)
            except (OSError, RuntimeError, ValueError) as error:
                log.warning("a tracker failed and gets nothing more", tracker=tracker.name, error=str(error))
                self._accelerator.trackers.remove(tracker)

    def close(self) -> None:
        """Send what is left, but not by accelerate's own call, which also takes the ranks apart."""
        for tracker in self._accelerator.trackers:
            tracker.finish()

    def _start(self, config: TidemillConfig, folder: Path) -> None:
        names = config.trainer.trackers
        check_trackers(names)
        own = {name: load(name, SETTING, config.base) for name in names if ":" in name}
        self._accelerator.project_configuration.set_directories(str(folder))
        try:
            self._accelerator.log_with = [
                own[name](config.run.name, str(folder)) if name in own else name for name in dict.fromkeys(names)
            ]
            self._accelerator.init_trackers(
                config.run.name,
                config=None if self._sent else _flat(config.model_dump(mode="json")),
                init_kwargs={"wandb": {"id": _identity(folder), "resume": "allow", "dir": str(folder)}},
            )
        except Exception as error:  # theirs may raise anything, and it is their settings that are wrong
            raise ConfigError(f"{SETTING} cannot start: {type(error).__name__}: {error}") from error


def _last_step(file: Path) -> int:
    """The highest step with a line in metrics.jsonl: steps up to there were sent before."""
    last = 0
    if file.is_file():
        with file.open(encoding="utf-8") as lines:
            for text in lines:
                try:
                    last = max(last, int(json.loads(text)["step"]))
                except (ValueError, KeyError, TypeError):
                    # Cut off by a crash.
                    continue
    return last


def _identity(folder: Path) -> str:
    """Arguments that name this run to a service that can go on with a run; a new run has a new folder."""
    file = folder / "id"
    if not file.is_file():
        file.write_text(secrets.token_hex(8), encoding="utf-8")
    return file.read_text(encoding="utf-8")


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, bool | str | int | float]:
    """``{"trainer.steps": 5, ...}``; the broker's address is left out, it may hold a password."""
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
