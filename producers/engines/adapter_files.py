"""An adapter's file has peft's names: ``base_model.model.LAYER.lora_A.weight`` [rank, in] and ``...lora_B.weight``
[out, rank]. Engines check it against the model before they touch anything.
"""

import json
import re
from pathlib import Path

from schemas.config import LoraConfig
from schemas.errors import DataError
from schemas.weight_files import Shapes

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
        if weight[1] == 1 and shapes.keys() == {"A", "B"}:
            # In 4 bits, a byte has two elements, and only their number is left of the shape.
            sizes = shapes["B"][0], shapes["A"][1]
            weight = sizes if sizes[0] * sizes[1] == 2 * weight[0] else weight
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
