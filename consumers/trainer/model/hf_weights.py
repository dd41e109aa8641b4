"""The policy's weights outside of the trainer: Hugging Face names, the probe's reference, the model as a folder.

A policy with an adapter publishes that alone, by peft's names; in a model folder it is merged into the weights. The
head of a safetensors file is made here; vLLM's ``load_weights`` takes the file as it is.
"""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from consumers.trainer.distributed.precision import dtype_rule
from consumers.trainer.fragments.actor_critic import Actor
from consumers.trainer.model.file_layout import TensorConversion, conversions
from consumers.trainer.model.lora import NAME, peft_config
from consumers.trainer.model.policy import DTYPES, Policy
from schemas.config import ModelConfig
from schemas.errors import ConfigError, DataError
from schemas.messages import TensorSpec
from schemas.model_folder import PROVENANCE, resolve_folder
from schemas.weight_files import check_fits, left_out, read_shapes

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SAFETENSORS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_PREFIX = "causal_lm."
_TOWER = "model.visual."
_ADAPTER = re.compile(rf"{re.escape(_PREFIX)}(.+)\.lora_([AB])\.{NAME}\.weight")
_UNDER = ".base_layer."
"""The part of a name that peft inserts for a layer that it adapts."""


@dataclass(frozen=True)
class FileLayout:
    """Content of a published file of a policy, and how it is made of the policy's weights.

    conversions: in the order of the file. dtypes: of each of the policy's tensors in the file, by its name in memory.
    """

    conversions: Sequence[TensorConversion]
    dtypes: Mapping[str, torch.dtype]

    @property
    def specs(self) -> list[TensorSpec]:
        """Names, dtypes and shapes of the file's tensors. Tied weights appear once."""
        return [
            TensorSpec(name, _NAMES[self.dtypes[conversion.sources[0]]], list(shape))
            for conversion in self.conversions
            for name, shape in conversion.shapes.items()
        ]


def file_layout(policy: Policy, dtype: str) -> FileLayout:
    """Return the layout of the files in which this policy is published; an adapter keeps peft's names."""
    weights = dict(wire_weights(policy))
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if policy.adapter is not None or isinstance(policy, Actor):
        return FileLayout(
            [TensorConversion([name], {name: shape}) for name, shape in shapes.items()],
            dict.fromkeys(weights, DTYPES[dtype]),
        )
    rule = dtype_rule(policy.causal_lm, DTYPES[dtype])
    return FileLayout(conversions(policy.causal_lm, shapes), {name: rule(name) for name in weights})


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


def save_model(policy: Policy, folder: Path, dtype: str, *, main: bool = True) -> None:
    """Write the model, ready for transformers and vLLM; every rank of a sharded one must call this."""
    if isinstance(policy, Actor):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(dict(named_weights(policy)), folder / "model.safetensors")
        return
    save_weights(policy.causal_lm, _merged(policy), folder, dtype, main=main)


def save_weights(
    model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]], folder: Path, dtype: str, *, main: bool = True
) -> None:
    """Write a model with these, possibly sharded, weights by their Hugging Face names; all ranks must call this."""
    state = {}
    rule = dtype_rule(model, DTYPES[dtype])
    for name, tensor in weights:
        gathered = whole(tensor, rule(name))
        if main:
            state[name] = gathered.cpu()
    if main:
        model.save_pretrained(folder, state_dict=state)
        config = copy.deepcopy(model.config)
        # Training keeps float32; what is written is what the generators had.
        config.dtype = DTYPES[dtype]
        config.save_pretrained(folder)


def save_adapter(policy: Policy, folder: Path, dtype: str, path: str) -> None:
    """Write the adapter alone, for peft and vLLM; path: the model that it belongs to. One process only."""
    if policy.adapter is None:
        raise ValueError("this policy has no adapter")
    state = {name: whole(tensor, DTYPES[dtype]).cpu() for name, tensor in wire_weights(policy)}
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    peft_config(policy.adapter, path).save_pretrained(str(folder))


def wire_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights to publish: the adapter by peft's names if there is one, or all of ``named_weights``.

    A frozen vision tower stays where it is.
    """
    if policy.adapter is None:
        frozen = policy.vision is not None and policy.vision.frozen
        for name, tensor in named_weights(policy):
            if not (frozen and name.startswith(_TOWER)):
                yield name, tensor
        return
    for name, tensor in policy.named_parameters():
        if found := _ADAPTER.fullmatch(name):
            yield f"base_model.model.{found[1]}.lora_{found[2]}.weight", tensor.detach()


def named_weights(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and saved floating-point buffers by Hugging Face name, without adapters; tied ones once."""
    saved = policy.state_dict().keys()
    for name, tensor in [*policy.named_parameters(), *policy.named_buffers()]:
        if name in saved and tensor.is_floating_point() and not _ADAPTER.fullmatch(name):
            yield name.removeprefix(_PREFIX).replace(_UNDER, "."), tensor.detach()


def _merged(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights; those with an adapter are whole and have it added, in float32."""
    if policy.adapter is None:
        yield from named_weights(policy)
        return
    parts, scale = dict(wire_weights(policy)), policy.adapter.alpha / policy.adapter.rank
    for name, tensor in named_weights(policy):
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        down, up = parts.get(f"{layer}.lora_A.weight"), parts.get(f"{layer}.lora_B.weight")
        if down is None or up is None:
            yield name, tensor
        else:
            change = scale * (whole(up, torch.float32) @ whole(down, torch.float32))
            yield name, whole(tensor, torch.float32) + change


def whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Gather all of a possibly sharded tensor, in ``dtype``."""
    tensor = tensor.to(dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def header(specs: Sequence[TensorSpec]) -> bytes:
    """Make the head of a safetensors file: the length of its JSON as uint64, then the JSON, padded to 8 bytes."""
    entries: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        end = offset + math.prod(spec.shape) * DTYPES[spec.dtype].itemsize
        entries[spec.name] = {"dtype": _SAFETENSORS[spec.dtype], "shape": spec.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def copy_tokenizer(model: ModelConfig, folder: Path) -> None:
    """Put the model's tokenizer and its other settings beside its new weights, file by file as they are.

    The list of a model's weight files stays behind: the new ones are one file, and vLLM reads only what a list names.
    How warm_start made the model is not copied: it does not describe the new weights.
    """
    for file in resolve_folder(model.path, weights=False).iterdir():
        wanted = file.suffix in (".json", ".txt", ".jinja", ".model") and not file.name.endswith(".index.json")
        if wanted and file.name != PROVENANCE and not (folder / file.name).exists():
            shutil.copy2(file, folder / file.name)
