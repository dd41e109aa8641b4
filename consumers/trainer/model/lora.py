"""The policy of a run before its first step: all of a model in training, or a low-rank adapter of it, by peft.

LoRA (arXiv 2106.09685): W + alpha / rank * B A with W frozen, B zero at first. W stays in model.dtype: no update ever
needs more digits of it, and every forward pass would cast them away. A and B are float32, like all that is trained.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from consumers.trainer.distributed.layout import has_windows
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.model.vision import VisionTower, image_settings_of
from schemas.config import LoraConfig, TidemillConfig
from schemas.digests import base_digest
from schemas.errors import ConfigError, DataError, describe_error
from schemas.messages import Adapter
from schemas.model_folder import find_tokens, resolve_folder
from schemas.weight_files import read_dtypes

if TYPE_CHECKING:  # importing it takes seconds, and model.kind mlp does not need it
    from transformers import PreTrainedModel

NAME = "default"
"""The name that peft gives an adapter by default."""


def make_policy(config: TidemillConfig, empty: bool = False, stored: bool = False) -> Policy:
    """Make the policy of a run before its first step; ConfigError if model.path or trainer.lora is wrong.

    empty: without weights, for a rank that gets them from another. stored: in the type of its files, where all of a
    model is trained: they are only mapped into memory then, and ``Ranks.prepare`` converts them.
    """
    model, settings = config.model, config.trainer.lora
    if settings is None:
        return load_policy(config, model.path, _stored_type(model.path) if stored and not empty else "float32", empty)
    policy = load_policy(config, model.path, model.dtype, empty, adapted=True)
    policy.adapter = adapt(policy.causal_lm, settings, _base(model.path), config.run.seed)
    if settings.start is not None and not empty:
        load_adapter(policy.causal_lm, policy.adapter, settings.start)
    return policy


def _stored_type(path: str) -> str:
    """Return the type of a model's files if it has fewer bits than float32, which it then has for all tensors."""
    try:
        types = read_dtypes(resolve_folder(path))
    except (DataError, OSError):
        return "float32"
    return {"BF16": "bfloat16", "F16": "float16"}.get(types.pop(), "float32") if len(types) == 1 else "float32"


def load_policy(config: TidemillConfig, path: str, dtype: str, empty: bool = False, adapted: bool = False) -> Policy:
    """Load a policy of the run's kind, without an adapter; ConfigError if that fails. adapted: as in ``load_model``."""
    model = config.model
    vision = model.kind == "vision"
    causal_lm = load_model(path, dtype, model.trust_remote_code, vision, empty, model.max_length, adapted)
    tower = VisionTower(causal_lm, image_settings_of(model), model.freeze_vision) if vision else None
    output_tokens = find_tokens(model.path, model.output_tokens)
    if config.exact and has_windows(causal_lm.config.get_text_config(), model.max_length):
        raise ConfigError("generator.exact: the model has layers with a window shorter than model.max_length")
    return Policy(causal_lm, vision=tower, output_tokens=output_tokens, exact=config.exact)


def adapt(model: PreTrainedModel, settings: LoraConfig, base: str, seed: int) -> Adapter:
    """Freeze ``model`` and put an adapter that changes nothing yet on its layers; returns what generators need.

    base: digest of the model. The same ``seed`` gives the same adapter, whatever was drawn before.
    """
    try:
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(f"trainer.lora needs the package peft: pip install peft ({error})") from error
    adapter = Adapter(rank=settings.rank, alpha=settings.alpha, targets=targets(model, settings.targets), base=base)
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(peft_config(adapter), model, NAME)
    for parameter in model.parameters():
        if parameter.requires_grad:
            # peft makes them in the type of the layer.
            parameter.data = parameter.data.float()
    return adapter


def load_adapter(model: PreTrainedModel, adapter: Adapter, folder: Path) -> None:
    """Load an adapter in peft's format into that of ``model``; ConfigError if it is missing or of another kind."""
    where = f"trainer.lora.start {folder}"
    try:
        saved = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        weights = load_file(folder / "adapter_model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{where}: there is no adapter in peft's format: {describe_error(error)}") from error
    known = {"peft_type": "LORA", "r": adapter.rank, "lora_alpha": adapter.alpha, "bias": "none"}
    known |= dict.fromkeys(("use_rslora", "use_dora", "fan_in_fan_out"), False) | {"modules_to_save": None}
    for name, wanted in known.items():
        if (found := saved.get(name, wanted)) != wanted:
            raise ConfigError(f"{where}: its {name} is {found!r}, must be {wanted!r}")
    parameters = {
        f"base_model.model.{name.replace(f'.{NAME}.', '.')}": parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    if different := sorted(parameters.keys() ^ weights.keys()):
        side = "is not in the adapter" if different[0] in parameters else "is not adapted by this run"
        raise ConfigError(f"{where}: {different[0]} {side}: set trainer.lora.targets to those of the adapter")
    for name, parameter in parameters.items():
        if weights[name].shape != parameter.shape:
            raise ConfigError(
                f"{where}: {name} has the shape {list(weights[name].shape)}, that of model.path {list(parameter.shape)}"
            )
        parameter.data.copy_(weights[name])


def targets(model: PreTrainedModel, wanted: list[str] | None) -> list[str]:
    """Return the last names of the layers to adapt, sorted; ConfigError if a wanted one matches no layer.

    A vision tower is not adapted: layers whose last name is in the tower, too, are named in full.
    """
    output, linear, of_tower = model.get_output_embeddings(), dict[str, list[str]](), set[str]()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not output:
            last = name.rpartition(".")[2]
            if ".visual." in f".{name}":
                of_tower.add(last)
            else:
                linear.setdefault(last, []).append(name)
    there = ", ".join(sorted(linear)) or "no linear layers"
    if not linear:
        raise ConfigError(f"trainer.lora: {type(model).__name__} has {there} to adapt")
    for name in wanted or ():
        if name not in linear:
            raise ConfigError(
                f"trainer.lora.targets: {name!r} is no linear layer of {type(model).__name__} that can be adapted,"
                f" there is {there}"
            )
    return sorted(name for last in set(wanted or linear) for name in (linear[last] if last in of_tower else [last]))


def peft_config(adapter: Adapter, path: str | None = None) -> Any:
    """Return the configuration of an adapter for peft; path: the model that the adapter belongs to."""
    from peft import LoraConfig as PeftConfig

    alpha = int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha
    return PeftConfig(
        r=adapter.rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        target_modules=list(adapter.targets),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        base_model_name_or_path=path,
    )


@contextmanager
def adapter_off(policy: Policy) -> Iterator[None]:
    """Switch the adapter off in the block: the policy is then the model as it was, to the bit, since zero is added."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in policy.modules() if isinstance(module, LoraLayer)]
    # Not peft's enable_adapters: that takes the gradient off parameters, which FSDP2 notes once and for all.
    for layer in layers:
        layer.set_scale(NAME, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(NAME, 1.0)


def describe(adapter: Adapter | None) -> dict[str, Any] | None:
    """Return an adapter's settings as plain data for JSON; None if there is no adapter."""
    return None if adapter is None else {name: getattr(adapter, name) for name in adapter.__struct_fields__}


def check_same(checkpoint: str, saved: dict[str, Any] | None, adapter: Adapter | None) -> None:
    """Raise ConfigError unless a checkpoint's adapter, as ``saved`` describes it, is ``adapter``; None: no adapter."""
    ours = describe(adapter)
    if saved == ours:
        return
    if saved is None or ours is None:
        kinds = [f"an adapter (rank {kind['rank']})" if kind else "a whole model" for kind in (saved, ours)]
        raise ConfigError(f"checkpoint {checkpoint} is of {kinds[0]}, and trainer.lora makes this run train {kinds[1]}")
    for name, value in saved.items():
        if value != ours.get(name):
            what = "model.path is another model" if name == "base" else f"trainer.lora.{name} is {ours.get(name)}"
            held = "" if name == "base" else f", the checkpoint's {value}"
            raise ConfigError(f"checkpoint {checkpoint} is of another adapter: {what}{held}")


def _base(path: str) -> str:
    try:
        return base_digest(resolve_folder(path))
    except (DataError, OSError) as error:
        raise ConfigError(f"trainer.lora: model.path {path}: {error}") from error
