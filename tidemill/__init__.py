"""Tidemill from Python: load a configuration, run it, ask a run's control plane, and the types that your own code gets.

Everything is imported when it is first used, so that ``import tidemill`` costs nothing. What is not in ``__all__`` may
change with any release.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from consumers.trainer.algorithms.losses import LossFunction, LossInputs, LossOutput, log_ratio
    from deploy.client.client import Client, connect
    from producers.datasets.base import Dataset, Example
    from producers.engines.base import Engine
    from producers.workflows.base import FailedSample, RolloutContext, Workflow
    from producers.workflows.trajectory_builder import SampledCompletion, TrajectoryBuilder
    from schemas.config import TidemillConfig, load_config, parse_config
    from schemas.errors import ConfigError, DataError, InfraError, RefusedError, TidemillError
    from schemas.messages import ChatMessage, ContentPart, Trajectory

    __version__: str

__all__ = [
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
]

_MODULES = {
    "consumers.trainer.algorithms.losses": ("LossFunction", "LossInputs", "LossOutput", "log_ratio"),
    "deploy.client.client": ("Client", "connect"),
    "producers.datasets.base": ("Dataset", "Example"),
    "producers.engines.base": ("Engine",),
    "producers.workflows.base": ("FailedSample", "RolloutContext", "Workflow"),
    "producers.workflows.trajectory_builder": ("SampledCompletion", "TrajectoryBuilder"),
    "schemas.config": ("TidemillConfig", "load_config", "parse_config"),
    "schemas.errors": ("ConfigError", "DataError", "InfraError", "RefusedError", "TidemillError"),
    "schemas.messages": ("ChatMessage", "ContentPart", "Trajectory"),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}


def run(config: TidemillConfig | Path | str, overrides: Sequence[str] = (), *, fresh: bool = False) -> int:
    """Run everything until the training is done, as ``tidemill up`` does; resumes a stopped run.

    config: a configuration, or its YAML file, for which alone overrides such as ``trainer.steps=50`` count.
    fresh: delete what an earlier run left.
    Returns the command's exit code, 0 when all steps are done; ConfigError for a wrong configuration. Ends as the
    command does at SIGINT and SIGTERM, so it belongs into the main thread.
    """
    from deploy.checks.names import check_names
    from deploy.launchers.factory import build_launcher
    from schemas.config import load_config

    loaded = load_config(Path(config), list(overrides)) if isinstance(config, Path | str) else config
    check_names(loaded)
    return build_launcher(loaded).launch(loaded, fresh)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("tidemill")
    if name not in _PLACES:
        raise AttributeError(f"module 'tidemill' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
