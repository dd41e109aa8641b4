"""The command `tidemill convert`: another system's file in, a configuration of Tidemill out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from deploy.migrate import trl, verl
from deploy.migrate.conversion import Conversion
from schemas.errors import ConfigError

SYSTEMS = {"trl": "TRL", "verl": "verl"}


def convert_file(file: Path, system: str | None = None, processes: int = 1) -> tuple[str, Conversion]:
    """Convert a script or a YAML file; returns the system's name with the conversion. ConfigError.

    system: trl or verl, by default what the file looks like. processes: ranks that trained there.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from error
    if system not in (None, *SYSTEMS):
        raise ConfigError(f"--from: {system!r} is not known, must be one of {', '.join(SYSTEMS)}")
    found, looks = _read(file, text)
    system = system or looks
    try:
        done = trl.convert(found, processes) if system == "trl" else verl.convert(found, processes)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file} holds a value of another type than {SYSTEMS[system]} gives it: {error}") from error
    if "path" not in done.config.get("model", {}):
        done.set("model.path", "MODEL")
        done.to_do.append("model.path: a folder or a hub id")
    return SYSTEMS[system], done


def _read(file: Path, text: str) -> tuple[dict[str, Any], str]:
    """Return the settings by key, and the system that they look like."""
    try:
        if file.suffix == ".py":
            found = trl.read_script(file, text)
            if found is None:
                raise ConfigError(f"{file} calls no GRPOConfig, there is nothing to convert")
            return found, "trl"
        if file.suffix in (".sh", ".bash"):
            found = verl.read_script(text)
            if not found:
                raise ConfigError(f"{file} has no overrides such as data.train_batch_size=1024")
            return found, "verl"
        tree = yaml.safe_load(text)
    except (SyntaxError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {file}: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} must hold settings, it holds {type(tree).__name__}")
    if {"actor_rollout_ref", "algorithm"} & set(tree):
        return dict(verl.flatten(tree)), "verl"
    return {str(key): value for key, value in tree.items()}, "trl"


def render(file: Path, system: str, done: Conversion) -> str:
    """Return the configuration as YAML, headed by what is left to do and what was left out."""
    lines = [f"# Converted from {file.name} of {system}. Try it with: tidemill doctor"]
    lines += [f"# {note}" for note in done.notes()]
    order = ("run", "model", "train", "eval", "sampling", "reward", "flow", "generator", "trainer")
    config = {name: done.config[name] for name in order if name in done.config}
    return "\n".join(lines) + "\n" + yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
