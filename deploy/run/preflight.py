"""Checks of a configuration that are cheap, made before any process or model is started."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from consumers.reward.scorer import check_reward
from consumers.trainer.metrics.trackers import check_trackers
from producers.datasets import DATASETS
from producers.engines import ENGINES
from producers.engines.factory import engine_name, find_engine
from producers.engines.sampling import check_sampling
from producers.tasks import make_sampling
from producers.workflows.base import find_workflow
from schemas.config import TidemillConfig
from schemas.errors import ConfigError


def check(config: TidemillConfig) -> None:
    """ConfigError for the first thing that cannot work. Loads neither a model nor a model library."""
    check_model(config)
    check_sampling(make_sampling(config.sampling), config.generator.allow_truncated, config.generator.args)
    DATASETS.get(config.train.name, config.base)
    check_reward(config.reward.terms, config.base)
    if config.eval is not None:
        DATASETS.get(config.eval.dataset.name, config.base)
        check_reward(config.eval.terms or config.reward.terms, config.base)
    check_trackers(config.trainer.trackers)
    if config.trainer.lora is not None and importlib.util.find_spec("peft") is None:
        raise ConfigError("trainer.lora needs the package peft: pip install peft")
    find_workflow(config.generator.workflow.name, config.generator.workflow.args, config.base)
    if engine_name(config.generator.engine) not in ENGINES.names:
        find_engine(config.generator.engine, config.base)


def check_model(config: TidemillConfig) -> None:
    """ConfigError when model.path can be no model, and no warm_start makes one."""
    if config.warm_start is not None:
        return
    folder = Path(config.model.path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model.path {config.model.path} has no config.json: it is no Hugging Face model folder")
    elif config.model.path.startswith((".", "/", "~")) or config.model.path.count("/") > 1:
        raise ConfigError(f"model.path {config.model.path} does not exist: name a model folder, or a hub id")
