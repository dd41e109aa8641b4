"""The choice of an engine: ``auto`` is vllm if it is installed, else transformers."""

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path

from producers.engines import ENGINES
from producers.engines.base import Ability, Engine, EngineSettings
from schemas.errors import ConfigError
from schemas.plugins import check_method


def engine_name(name: str) -> str:
    """Resolve ``auto``; ConfigError if no engine is installed."""
    if name != "auto":
        return name
    for package in ("vllm", "transformers"):
        if importlib.util.find_spec(package):
            return package
    raise ConfigError("generator.engine auto: neither vllm nor transformers is installed; pip install 'tidemill[vllm]'")


_METHODS = {
    name: tuple(parameter for parameter in inspect.signature(method).parameters if parameter not in ("self", "images"))
    for name, method in vars(Engine).items()
    if inspect.isfunction(method) and not name.startswith("_")
}
"""Parameters of each method of Engine; ``images`` is given only to engines of models that read images."""


def find_engine(name: str, base: Path) -> Callable[[EngineSettings], Engine]:
    """Return the class of an engine, built in or a user's module below ``base``; ConfigError if it lacks a method."""
    engine: Callable[[EngineSettings], Engine] = ENGINES.get(engine_name(name), base)
    if inspect.isclass(engine):
        for method, parameters in _METHODS.items():
            check_method("generator.engine", engine, method, parameters)
    return engine


def check_abilities(engine: Engine, needed: Mapping[Ability, str]) -> None:
    """Raise ConfigError if the engine lacks what a setting needs. needed: the setting that needs each ability."""
    lacks: Mapping[Ability, str] = getattr(engine, "lacks", {})  # a user's engine may not declare it
    for ability, setting in needed.items():
        if ability in lacks:
            raise ConfigError(f"{setting}: the engine does not support it: {lacks[ability]}")


def prepare_engine(name: str, vision: bool) -> None:
    """Prepare the process for this engine, before it has threads and connections. vision: the model reads images."""
    if engine_name(name) == "vllm":
        from producers.engines.vllm.core_process import prepare

        prepare(vision)


def make_engine(name: str, settings: EngineSettings, base: Path) -> Engine:
    """Build the engine of this name without starting it; see ``find_engine``."""
    return find_engine(name, base)(settings)
