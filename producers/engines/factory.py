"""Which engine a configuration means: ``auto`` is vllm where it is installed, else transformers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from producers.engines import ENGINES
from producers.engines.base import Engine, EngineSettings
from schemas.errors import ConfigError


def engine_name(name: str) -> str:
    """Resolve ``auto``; ConfigError when no engine is installed."""
    if name != "auto":
        return name
    for package in ("vllm", "transformers"):
        if importlib.util.find_spec(package):
            return package
    raise ConfigError("generator.engine auto: neither vllm nor transformers is installed; pip install 'tidemill[vllm]'")


def make_engine(name: str, settings: EngineSettings, base: Path) -> Engine:
    """Build the engine of this name, or of a user's module below ``base``. It is not started yet."""
    engine: Engine = ENGINES.get(engine_name(name), base)(settings)
    return engine
