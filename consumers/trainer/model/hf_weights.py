"""The policy's weights outside of the trainer: Hugging Face names, the probe's reference, the model as a folder.

A policy with an adapter publishes that alone, by peft's names; in a model folder it is merged into the weights.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from consumers.trainer.distributed.precision import dequantise, dtype_rule, is_quantised, layer_shape
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.fragments.actor_critic import Actor
from consumers.trainer.model.file_layout import (
    FileLayout,
    FilePiece,
    SharedFile,
    TensorConversion,
    conversions,
    mark_file,
    whole,
)
from consumers.trainer.model.lora import NAME, peft_config
from consumers.trainer.model.policy import DTYPES, Policy
from schemas.config import ModelConfig
from schemas.errors import ConfigError, DataError
from schemas.model_folder import PROVENANCE, resolve_folder
from schemas.weight_files import check_fits, left_out, read_shapes

if TYPE_CHECKING:  # importing it takes seconds, and model.kind mlp does not need it
    from transformers import PreTrainedModel

_PREFIX = "causal_lm."
_TOWER = "model.visual."
_ADAPTER = re.compile(rf"{re.escape(_PREFIX)}(.+)\.lora_([AB])\.{NAME}\.weight")
_PEFT = "base_model.model."
FILE_BYTES = 50 * 10**9
"""Most bytes of a file of an exported model, as transformers has it."""
_UNDER = ".base_layer."
"""The part of a name that peft inserts for a layer that it adapts."""


def file_layout(policy: Policy, dtype: str) -> FileLayout:
    """Return the layout of the files in which this policy is published; an adapter has peft's names."""
    weights = dict(wire_weights(policy))
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if policy.adapter is not None or isinstance(policy, Actor):
        names = dict(zip(shapes, shapes if policy.vision is None else _in_files(policy, shapes), strict=True))
        return FileLayout(
            [TensorConversion([name], {names[name]: shape}) for name, shape in shapes.items()],
            dict.fromkeys(weights, DTYPES[dtype]),
        )
    rule = dtype_rule(policy.causal_lm, DTYPES[dtype])
    return FileLayout(conversions(policy.causal_lm, shapes), {name: rule(name) for name in weights})


def _in_files(policy: Policy, names: Iterable[str]) -> list[str]:
    """Return the names of an adapter's tensors with the layers' names in the model's files, by which engines check."""
    found = []
    for name in names:
        layer, part = name.removeprefix(_PEFT).split(".lora_")
        (conversion,) = conversions(policy.causal_lm, {f"{layer}.weight": (1, 1)})
        found.append(f"{_PEFT}{next(iter(conversion.shapes)).removesuffix('.weight')}.lora_{part}")
    return found


def check_published(policy: Policy, model: ModelConfig) -> None:
    """Compare what will be published with the model's folder, as engines do. ConfigError if they would reject it."""
    folder = resolve_folder(model.path, weights=False)
    if policy.adapter is not None or isinstance(policy, Actor) or not any(folder.glob("*.safetensors")):
        return
    published = {spec.name: tuple(spec.shape) for spec in file_layout(policy, "float32").specs}
    config = policy.causal_lm.config.get_text_config()
    try:
        check_fits(
            folder,
            published,
            read_shapes(folder),
            bool(config.tie_word_embeddings),
            vision=policy.vision is not None,
            frozen=policy.vision is not None and policy.vision.frozen,
            left_out=lambda: left_out(folder, model.trust_remote_code),
        )
    except DataError as error:
        raise ConfigError(
            f"model.path {model.path}: transformers makes other tensors of this model than its folder holds,"
            f" and engines would reject what the trainer publishes: {error}"
        ) from error


def save_model(policy: Policy, folder: Path, dtype: str, ranks: Ranks | None = None) -> None:
    """Write the model, ready for transformers and vLLM; every rank of a sharded one must call this."""
    if isinstance(policy, Actor):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(dict(named_weights(policy)), folder / "model.safetensors")
        return
    save_weights(policy.causal_lm, named_weights(policy), folder, dtype, ranks, _merge(policy))


def save_weights(
    model: PreTrainedModel,
    weights: Iterable[tuple[str, Tensor]],
    folder: Path,
    dtype: str,
    ranks: Ranks | None = None,
    change: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
) -> None:
    """Write a model with these weights by their Hugging Face names, one tensor at a time in memory.

    ranks: that hold parts of the weights, all of which must call this; each writes its own if it sees the folder.
    change: what becomes of a tensor of this name.
    """
    rule, named = dtype_rule(model, DTYPES[dtype]), dict(weights)
    shapes = {name: layer_shape(tensor) for name, tensor in named.items()}
    layout = FileLayout(conversions(model, shapes), {name: rule(name) for name in shapes})
    rank = 0 if ranks is None else ranks.rank
    together = ranks if ranks is not None and ranks.world > 1 else None
    channel = None if together is None else together.channel
    problem = _save_settings(model, folder, DTYPES[dtype]) if rank == 0 else ""
    parts, found = layout.split(FILE_BYTES), dict[str, str]()
    for number, part in enumerate(parts):
        of_many = f"-{number + 1:05d}-of-{len(parts):05d}" if len(parts) > 1 else ""
        path, mark, head = folder / f"model{of_many}.safetensors", "", part.head if rank == 0 else b""
        found |= dict.fromkeys(part.places, path.name)
        if rank == 0 and not problem:
            mark, failure = mark_file(path)
            problem = "" if failure is None else str(failure)
        file = SharedFile(path, mark if together is None else together.broadcast_text(mark), together, channel)
        file.problem = problem
        # A rank that cannot write gathers on, for the others wait for it. What is sent waits for all that is gathered.
        later: list[FilePiece] = []
        for piece in part.pieces(lambda name: change(name, dequantise(named[name])), file):
            later.append(piece)
            if not (file.blind and rank):
                file.write(later, head)
                later, head = [], b""
        file.write(later)
        problem = file.complete()
    if problem:
        raise OSError(problem)
    if rank == 0 and len(parts) > 1:
        content = {"metadata": {"total_size": layout.size}, "weight_map": found}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2), encoding="utf-8")


def _save_settings(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> str:
    """Write all of a model but its weights; returns what went wrong, "" for nothing."""
    try:
        model.save_pretrained(folder, state_dict={})
        config = copy.deepcopy(model.config)
        # Training keeps float32; what is written is what the generators had.
        config.dtype = dtype
        config.save_pretrained(folder)
    except OSError as error:
        return str(error)
    return ""


def save_adapter(policy: Policy, folder: Path, dtype: str, path: str) -> None:
    """Write the adapter alone, for peft and vLLM; path: the model that it belongs to. One process only."""
    if policy.adapter is None:
        raise ValueError("this policy has no adapter")
    state = {name: whole(tensor, DTYPES[dtype]).cpu() for name, tensor in wire_weights(policy)}
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    peft_config(policy.adapter, path).save_pretrained(str(folder))


def wire_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights to publish: the adapter by peft's names, or ``named_weights`` without a frozen vision tower."""
    if policy.adapter is None:
        frozen = policy.vision is not None and policy.vision.frozen
        for name, tensor in named_weights(policy):
            if not (frozen and name.startswith(_TOWER)):
                yield name, tensor
        return
    for name, tensor in policy.named_parameters():
        if found := _ADAPTER.fullmatch(name):
            yield f"{_PEFT}{found[1]}.lora_{found[2]}.weight", tensor.detach()


def named_weights(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and saved buffers by Hugging Face name, without adapters; tied ones once.

    Of integers there are only a language model's buffers, such as DeepSeek V4's table of each token's experts, and
    weights in 4 bits.
    """
    saved = policy.state_dict().keys()
    integers = {name for name, _ in policy.named_buffers() if name.startswith(_PREFIX)}
    for name, tensor in [*policy.named_parameters(), *policy.named_buffers()]:
        counts = tensor.is_floating_point() or name in integers or is_quantised(tensor)
        if name in saved and counts and not _ADAPTER.fullmatch(name):
            # What is detached has no scales.
            yield name.removeprefix(_PREFIX).replace(_UNDER, "."), tensor if is_quantised(tensor) else tensor.detach()


def _merge(policy: Policy) -> Callable[[str, Tensor], Tensor]:
    """Return what adds the adapter, in float32, to the tensors that have one, which are then whole."""
    if policy.adapter is None:
        return lambda name, tensor: tensor
    parts, scale = dict(wire_weights(policy)), policy.adapter.alpha / policy.adapter.rank

    def merged(name: str, tensor: Tensor) -> Tensor:
        layer = f"{_PEFT}{name.removesuffix('.weight')}"
        down, up = parts.get(f"{layer}.lora_A.weight"), parts.get(f"{layer}.lora_B.weight")
        if down is None or up is None:
            return tensor
        return whole(tensor, torch.float32) + scale * (whole(up, torch.float32) @ whole(down, torch.float32))

    return merged


def copy_tokenizer(model: ModelConfig, folder: Path) -> None:
    """Copy a model's tokenizer and settings, but not its list of weight files, nor how warm_start made the model."""
    for file in resolve_folder(model.path, weights=False).iterdir():
        # The list of weight files is left out: vLLM reads only files that it names, and the new ones may be others.
        wanted = file.suffix in (".json", ".txt", ".jinja", ".model") and not file.name.endswith(".index.json")
        if wanted and file.name != PROVENANCE and not (folder / file.name).exists():
            shutil.copy2(file, folder / file.name)
