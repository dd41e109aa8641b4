"""A checkpoint as a Hugging Face model with its tokenizer: one process reads the policy's weights and nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

from consumers.trainer.checkpoint.files import whole_folder
from consumers.trainer.checkpoint.state import model_tensors, put_model_tensors
from consumers.trainer.checkpoint.store import CheckpointStore, WantedStep, load_tensors, read_state
from consumers.trainer.fragments.actor_critic import Actor
from consumers.trainer.model.hf_weights import copy_tokenizer, save_adapter, save_model
from consumers.trainer.model.lora import check_same, make_policy
from consumers.trainer.model.policy import Policy
from schemas.config import TidemillConfig
from schemas.errors import ConfigError
from schemas.policy_shape import PolicyShape


def export_checkpoint(
    config: TidemillConfig, step: WantedStep, out: Path | None, stage: Callable[[str], None], adapter: bool = False
) -> tuple[Path, Path]:
    """Write the model of a checkpoint, see ``CheckpointStore.at``; returns that checkpoint and the folder.

    out: a folder that does not exist yet, by default ``exports/`` of the run with the checkpoint's name. It appears
    whole or not at all. stage: called with what is being done. adapter: write only the adapter, in peft's format, and
    no model with the adapter in its weights. ConfigError if the checkpoint is missing or damaged.
    """
    if adapter and config.trainer.lora is None:
        raise ConfigError("this run has no trainer.lora, so there is no adapter to export: leave --adapter out")
    stage("checking the checkpoint")
    path, out = find_export(config, step, out, adapter)
    with whole_folder(out, "folder with --to") as aside:
        stage(f"loading {path.name}")
        policy = load_trained(config, path)
        stage(f"writing {out}")
        if adapter:
            save_adapter(policy, aside, config.model.dtype, config.model.path)
        else:
            save_model(policy, aside, config.model.dtype)
        copy_tokenizer(config.model, aside)
    return path, out


def load_trained(config: TidemillConfig, path: Path) -> Policy:
    """Load the policy of a checkpoint; ConfigError if the checkpoint is of another model."""
    if config.model.kind == "mlp":
        policy = cast(Policy, Actor(PolicyShape.read(config.model.path)))
    else:
        policy = make_policy(config)
        check_same(path.name, read_state(path).get("adapter"), policy.adapter)
    tensors = {"model": model_tensors(policy)}
    load_tensors(path, tensors)
    put_model_tensors(policy, tensors["model"])
    return policy


def find_export(config: TidemillConfig, step: WantedStep, out: Path | None, adapter: bool) -> tuple[Path, Path]:
    """Return the checkpoint to export, and the folder for it. ConfigError if the checkpoint is missing or damaged."""
    path = CheckpointStore(config.folder / "checkpoints").at(step)
    return path, out or config.folder / "exports" / (f"{path.name}-adapter" if adapter else path.name)
