"""Checks whether a file of weights fits a model, by safetensors headers.

Engines check a new file before they touch anything: vLLM and transformers silently accept files with missing tensors.
"""

import json
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from schemas.errors import DataError

Shapes = dict[str, tuple[int, ...]]
"""The shape of each tensor by its name."""

_MAX_HEADER = 100_000_000
_DERIVED = (".rotary_emb.inv_freq",)


def read_shapes(path: Path) -> Shapes:
    """Read names and shapes from a safetensors file, or from all in a folder. DataError if it can't be read."""
    return {name: tuple(entry["shape"]) for name, entry in _read_headers(path).items()}


def read_dtypes(path: Path) -> set[str]:
    """Read the types of the tensors in a safetensors file, or in all of a folder: F32, BF16. DataError as above."""
    return {str(entry["dtype"]) for entry in _read_headers(path).values()}


def _read_headers(path: Path) -> dict[str, dict[str, Any]]:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path} holds no safetensors file")
    return dict(entry for file in files for entry in read_header(file)[0].items())


def read_header(file: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Read what a safetensors file says of each tensor, and where their data begins. DataError as above."""
    try:
        with file.open("rb") as stream:
            size = struct.unpack("<Q", stream.read(8))[0]
            if size > _MAX_HEADER:
                raise DataError(f"{file} is not a safetensors file: header of {size} bytes")
            header: dict[str, dict[str, Any]] = json.loads(stream.read(size))
            header.pop("__metadata__", None)
            data, end = 8 + size, max((entry["data_offsets"][1] for entry in header.values()), default=0)
            if not all(isinstance(entry["shape"], list) and entry["dtype"] for entry in header.values()):
                raise ValueError("a tensor has no shape or type")
        if file.stat().st_size != data + end:
            raise DataError(f"{file} is cut short: {file.stat().st_size} of {data + end} bytes")
    except OSError as error:
        raise DataError(f"{file} can't be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise DataError(f"{file} is not a safetensors file: {error}") from error
    return header, data


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
    left_out: Callable[[], re.Pattern[str]] | None = None,
) -> None:
    """Raise DataError unless ``new`` (read from ``path``) has exactly the tensors of ``model``.

    With tied embeddings ``lm_head.weight`` is optional. Buffers that code derives don't count. vision: the model reads
    images. frozen: the file lacks the vision tower. left_out: returns what matches names of the model's tensors that
    the file may lack, see ``left_out``.
    """
    if vision:
        model = {current_name(name): shape for name, shape in model.items()}
        new = {current_name(name): shape for name, shape in new.items()}
    if frozen:
        model = {name: shape for name, shape in model.items() if not name.startswith("model.visual.")}

    def counted(names: Mapping[str, tuple[int, ...]]) -> set[str]:
        return {n for n in names if not n.endswith(_DERIVED) and not (tied and n == "lm_head.weight")}

    missing, unknown = counted(model) - counted(new), counted(new) - counted(model)
    if missing and left_out is not None:
        allowed = left_out()
        missing = {name for name in missing if not allowed.search(name)}
    for what, names in (("lacks", missing), ("has unknown", unknown)):
        if names:
            shown = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise DataError(f"weights at {path} don't fit this model: the file {what} {shown}")
    for name in counted(model) & counted(new):
        if tuple(new[name]) != tuple(model[name]):
            raise DataError(
                f"weights at {path} don't fit this model: {name} has shape {list(new[name])}, not {list(model[name])}"
            )


def left_out(folder: Path, trust_remote_code: bool = False) -> re.Pattern[str]:
    """Return what matches names of a model folder's tensors that transformers does not load, and so does not train.

    These are layers for speculative decoding, for example; engines keep them as they are.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    try:
        kind = type(AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code))
    except (OSError, ValueError):  # an architecture that only the engine knows
        return re.compile(r"(?!)")
    patterns: list[str] = []
    for models in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if kind in models._model_mapping:
            patterns += getattr(models._model_mapping[kind], "_keys_to_ignore_on_load_unexpected", None) or ()
    return re.compile("|".join(f"(?:{each})" for each in patterns) or r"(?!)")
