"""Which engine a configuration means: ``auto`` is vllm where it is installed, else transformers."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path

from producers.engines import ENGINES
from producers.engines.base import Ability, Engine, EngineSettings
from schemas.errors import ConfigError
from schemas.plugins import check_method


def engine_name(name: str) -> str:
    """Resolve ``auto``; ConfigError when no engine is installed."""
    if name != "auto":
        return name
    for package in ("vllm", "transformers"):
        if importlib.util.find_spec(package):
            return package
    raise ConfigError("generator.engine auto: neither vllm nor transformers is installed; pip install 'tidemill[vllm]'")


_METHODS = {
    "start": (),
    "generate": ("prompt_ids", "sampling", "n", "prefix", "progress"),
    "load": ("source", "version"),
    "logprobs": ("token_ids",),
    "cache_usage": (),
    "growth": (),
    "pause": (),
    "resume": (),
    "abort_all": (),
    "close": (),
}


def find_engine(name: str, base: Path) -> Callable[[EngineSettings], Engine]:
    """The class of the engine of this name, or of a user's module below ``base``; ConfigError if it lacks a method."""
    found: Callable[[EngineSettings], Engine] = ENGINES.get(engine_name(name), base)
    if inspect.isclass(found):
        for method, parameters in _METHODS.items():
            check_method("generator.engine", found, method, parameters)
    return found


def check_abilities(engine: Engine, needed: Mapping[Ability, str]) -> None:
    """ConfigError when the engine lacks what a setting needs. needed: the setting of each ability."""
    lacks: Mapping[Ability, str] = getattr(engine, "lacks", {})  # a user's own may be silent about it
    for ability, setting in needed.items():
        if ability in lacks:
            raise ConfigError(f"{setting}: the engine can't do that, {lacks[ability]}")


def prepare_engine(name: str, vision: bool) -> None:
    """Do what the engine of this name wants done before the process has threads and connections.

    vision: whether its model reads images.
    """
    if engine_name(name) == "vllm":
        from producers.engines.vllm.core_process import prepare

        prepare(vision)


def make_engine(name: str, settings: EngineSettings, base: Path) -> Engine:
    """Build the engine of this name, see ``find_engine``. It is not started yet."""
    return find_engine(name, base)(settings)
