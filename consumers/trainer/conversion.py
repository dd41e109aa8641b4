"""A checkpoint as a Hugging Face model with its tokenizer, in one process, whatever number of ranks wrote it.

Only the policy's weights are read: neither the optimizer nor a critic takes memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from consumers.trainer.checkpoints import Checkpoints, load_tensors
from consumers.trainer.export import copy_tokenizer, save_model
from consumers.trainer.folder import whole_folder
from consumers.trainer.policy import Policy, load_model
from consumers.trainer.ranks import reason
from schemas.config import TidemillConfig
from schemas.errors import ConfigError


def export_checkpoint(
    config: TidemillConfig, step: int | None, out: Path | None, stage: Callable[[str], None]
) -> tuple[Path, Path]:
    """Write the model of the checkpoint of ``step``, the newest by default; that checkpoint, and the model's folder.

    out: a folder that is not there yet, ``exports/`` of the run with the checkpoint's name by default. It appears
    whole or not at all. stage: told what is done now. ConfigError when there is no such checkpoint or it is damaged.
    """
    stage("checking the checkpoint")
    path = Checkpoints(config.folder / "checkpoints").at(step)
    out = out or config.folder / "exports" / path.name
    with whole_folder(out, "folder with --to") as aside:
        stage(f"loading {path.name}")
        policy = Policy(load_model(config.model.path, "float32", config.model.trust_remote_code))
        tensors = {"model": get_model_state_dict(policy)}
        try:
            load_tensors(path, tensors)
        except CheckpointException as error:
            raise ConfigError(
                f"checkpoint {path.name} is not one of model.path {config.model.path!r}: {reason(error)}"
            ) from error
        set_model_state_dict(policy, tensors["model"])
        stage(f"writing {out}")
        save_model(policy, aside, config.model.dtype)
        copy_tokenizer(config.model, aside)
    return path, out
