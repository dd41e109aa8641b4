"""Finds a run on disk by its name, its folder or its configuration, without a broker."""

from __future__ import annotations

import json
from pathlib import Path

from schemas.config import TidemillConfig, load_config
from schemas.errors import ConfigError

CONFIG = "config.yaml"
RUNS = Path("runs")


def config_of(run: str) -> TidemillConfig:
    """The configuration of a run: a YAML file, or the one in effect that ``tidemill up`` left in the run's folder."""
    if run.endswith((".yaml", ".yml")):
        return load_config(run)
    found = [file for folder in (RUNS / run, Path(run)) if (file := folder / CONFIG).is_file()]
    if not found:
        raise ConfigError(f"no run {run!r}: there is no {RUNS / run / CONFIG}; give its folder or its YAML file")
    # Where it is now, wherever it was made.
    return load_config(found[0], [f"run.folder={json.dumps(str(found[0].parent.resolve()))}"])
