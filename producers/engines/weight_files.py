"""Checks whether a file of weights fits the model in an engine, by safetensors headers: a whole model or an adapter.

Engines check a new file before they touch anything: the loaders of vLLM and transformers silently accept files with
missing tensors. An adapter's file has peft's names: ``base_model.model.LAYER.lora_A.weight`` [rank, in] and
``...lora_B.weight`` [out, rank].
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path

from schemas.config import LoraConfig
from schemas.errors import DataError

Shapes = dict[str, tuple[int, ...]]
"""The shape of each tensor by its name."""

_MAX_HEADER = 100_000_000
_DERIVED = (".rotary_emb.inv_freq",)


def read_shapes(path: Path) -> Shapes:
    """Read names and shapes from a safetensors file, or from all in a folder. DataError if it can't be read."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path} holds no safetensors file")
    shapes: Shapes = {}
    for file in files:
        shapes.update(_read_header(file))
    return shapes


def _read_header(file: Path) -> Shapes:
    try:
        with file.open("rb") as stream:
            size = struct.unpack("<Q", stream.read(8))[0]
            if size > _MAX_HEADER:
                raise DataError(f"{file} is not a safetensors file: header of {size} bytes")
            header = json.loads(stream.read(size))
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
            shapes = {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
        if file.stat().st_size != 8 + size + end:
            raise DataError(f"{file} is cut short: {file.stat().st_size} of {8 + size + end} bytes")
    except OSError as error:
        raise DataError(f"{file} can't be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise DataError(f"{file} is not a safetensors file: {error}") from error
    return shapes


_OLD_NAMES = (("visual.", "model.visual."), ("model.", "model.language_model."))


def current_name(name: str) -> str:
    """Map a tensor name from an older vision checkpoint to the current transformers name."""
    if name.startswith(("model.visual.", "model.language_model.")):
        return name
    return next((new + name.removeprefix(old) for old, new in _OLD_NAMES if name.startswith(old)), name)


def check_fits(
    path: Path,
    new: Mapping[str, tuple[int, ...]],
    model: Mapping[str, tuple[int, ...]],
    tied: bool,
    *,
    vision: bool = False,
    frozen: bool = False,
) -> None:
    """Raise DataError unless ``new`` (read from ``path``) has exactly the tensors of ``model``.

    With tied embeddings ``lm_head.weight`` is optional. Buffers that code derives don't count. vision: the model reads
    images. frozen: the file lacks the vision tower.
    """
    if vision:
        model = {current_name(name): shape for name, shape in model.items()}
        new = {current_name(name): shape for name, shape in new.items()}
    if frozen:
        model = {name: shape for name, shape in model.items() if not name.startswith("model.visual.")}

    def counted(names: Mapping[str, tuple[int, ...]]) -> set[str]:
        return {n for n in names if not n.endswith(_DERIVED) and not (tied and n == "lm_head.weight")}

    missing, unknown = counted(model) - counted(new), counted(new) - counted(model)
    for what, names in (("lacks", missing), ("has unknown", unknown)):
        if names:
            shown = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise DataError(f"weights at {path} don't fit this model: the file {what} {shown}")
    for name in counted(model):
        if tuple(new[name]) != tuple(model[name]):
            raise DataError(
                f"weights at {path} don't fit this model: {name} has shape {list(new[name])}, not {list(model[name])}"
            )


_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


def adapted_layers(path: Path, new: Shapes, model: Shapes, rank: int) -> list[str]:
    """Return the layers of the adapter ``new``, read from ``path``. DataError unless all of it fits ``model``."""
    parts: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in new.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise DataError(f"{path} is not an adapter: it has a tensor {name}")
        parts.setdefault(match[1], {})[match[2]] = shape
    if not parts:
        raise DataError(f"{path} is not an adapter: it is empty")
    for layer, shapes in parts.items():
        weight = model.get(f"{layer}.weight", ())
        if len(weight) != 2:
            raise DataError(f"the adapter {path} doesn't fit this model, which has no linear layer {layer}")
        wanted = {"A": (rank, weight[1]), "B": (weight[0], rank)}
        for part, shape in wanted.items():
            if shapes.get(part) != shape:
                there = list(shapes[part]) if part in shapes else "missing"
                raise DataError(
                    f"the adapter {path} doesn't fit this model: lora_{part} of {layer} is {there}, not {list(shape)}"
                )
    return sorted(parts)


def write_adapter_folder(folder: Path, lora: LoraConfig, layers: list[str], file: Path) -> None:
    """Write a peft folder for an adapter whose ``file`` stays in place."""
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").symlink_to(file.resolve())
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "bias": "none",
        "target_modules": sorted({layer.rpartition(".")[2] for layer in layers}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(described), encoding="utf-8")
