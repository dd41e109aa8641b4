"""Tidemill from Python: load a configuration, run it, ask a run's control plane, and the types that your own code gets.

Everything is imported when it is first used, so that ``import tidemill`` costs nothing. What is not in ``__all__`` may
change with any release.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from consumers.trainer.algorithms.losses import LossFunction, LossInputs, LossOutput, log_ratio
    from deploy.client.client import Client, connect
    from deploy.python.started_run import Callback, StartedRun
    from producers.datasets.base import Dataset, Example
    from producers.engines.base import Engine
    from producers.workflows.base import FailedSample, RolloutContext, Workflow
    from producers.workflows.trajectory_builder import SampledCompletion, TrajectoryBuilder
    from schemas.config import TidemillConfig, load_config, parse_config
    from schemas.errors import ConfigError, DataError, InfraError, RefusedError, TidemillError
    from schemas.messages import ChatMessage, ContentPart, Trajectory

    __version__: str

__all__ = [
    "Callback",
    "ChatMessage",
    "Client",
    "ConfigError",
    "ContentPart",
    "DataError",
    "Dataset",
    "Engine",
    "Example",
    "FailedSample",
    "InfraError",
    "LossFunction",
    "LossInputs",
    "LossOutput",
    "RefusedError",
    "RolloutContext",
    "SampledCompletion",
    "StartedRun",
    "TidemillConfig",
    "TidemillError",
    "Trajectory",
    "TrajectoryBuilder",
    "Workflow",
    "connect",
    "load_config",
    "log_ratio",
    "parse_config",
    "run",
    "start",
]

_MODULES = {
    "consumers.trainer.algorithms.losses": ("LossFunction", "LossInputs", "LossOutput", "log_ratio"),
    "deploy.client.client": ("Client", "connect"),
    "deploy.python.started_run": ("Callback", "StartedRun"),
    "producers.datasets.base": ("Dataset", "Example"),
    "producers.engines.base": ("Engine",),
    "producers.workflows.base": ("FailedSample", "RolloutContext", "Workflow"),
    "producers.workflows.trajectory_builder": ("SampledCompletion", "TrajectoryBuilder"),
    "schemas.config": ("TidemillConfig", "load_config", "parse_config"),
    "schemas.errors": ("ConfigError", "DataError", "InfraError", "RefusedError", "TidemillError"),
    "schemas.messages": ("ChatMessage", "ContentPart", "Trajectory"),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}


def run(
    config: TidemillConfig | Mapping[str, Any] | Path | str,
    overrides: Sequence[str] = (),
    *,
    rewards: Any = None,
    train: Any = None,
    eval: Any = None,
    fresh: bool = False,
    callbacks: Sequence[Callback] = (),
) -> int:
    """Run everything until the training is done, as ``tidemill up`` does; resumes a stopped run.

    The arguments are those of ``start``. Returns the command's exit code, 0 when all steps are done; ConfigError for a
    wrong configuration. In the main thread it ends as the command does at SIGINT and SIGTERM; in another thread, and
    with callbacks, the run is a process of its own.
    """
    import threading

    if callbacks or threading.current_thread() is not threading.main_thread():
        options: Any = {"rewards": rewards, "train": train, "eval": eval, "fresh": fresh, "callbacks": callbacks}
        with start(config, overrides, **options) as started:
            started.wait()
        return started.exit_code or 0
    from deploy.launchers.factory import build_launcher

    loaded = _settled(config, overrides, rewards, train, eval)
    return build_launcher(loaded).launch(loaded, fresh)


def start(
    config: TidemillConfig | Mapping[str, Any] | Path | str,
    overrides: Sequence[str] = (),
    *,
    rewards: Any = None,
    train: Any = None,
    eval: Any = None,
    fresh: bool = False,
    callbacks: Sequence[Callback] = (),
) -> StartedRun:
    """Start or resume a run as a process of its own and return at once; from a notebook, a thread, an event loop.

    config: a configuration, a mapping, or a YAML file, which alone takes overrides such as ``trainer.steps=50``.
    rewards: a term of the reward, or several: functions, names, or sections such as ``{"name": f, "weight": 2}``.
    train, eval: prompts to train on and held-out ones: rows, a ``datasets.Dataset``, a name, or a section.
    fresh: delete what an earlier run left. ConfigError for a wrong configuration, and for what can't be carried.
    """
    from deploy.python.started_run import StartedRun

    return StartedRun(_settled(config, overrides, rewards, train, eval), fresh, callbacks)


def _settled(
    config: TidemillConfig | Mapping[str, Any] | Path | str,
    overrides: Sequence[str],
    rewards: Any,
    train: Any,
    held_out: Any,
) -> TidemillConfig:
    from deploy.checks.names import check_names
    from deploy.python.objects import settle_objects

    loaded = settle_objects(config, overrides, rewards, train, held_out)
    check_names(loaded)
    return loaded


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("tidemill")
    if name not in _PLACES:
        raise AttributeError(f"module 'tidemill' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
