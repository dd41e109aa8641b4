"""From the tensors of a model in memory to those of its folder, as transformers' ``save_pretrained`` makes them.

transformers keeps some weights in memory in another form than in files: all experts of a layer as one tensor, or a
tensor under another name. Engines read the form of files, so that this is what is published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class TensorConversion:
    """How some tensors of a model become tensors of its file.

    sources: their names in the model. shapes: names and shapes in the file, in its order. model: None if the one source
    is stored as it is, perhaps under another name.
    """

    sources: Sequence[str]
    shapes: Shapes
    model: PreTrainedModel | None = field(default=None, repr=False)

    def apply(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Convert the whole ``tensors`` of ``sources``; memory for a copy of them is needed, if they change at all."""
        if self.model is None:
            return list(tensors)
        made = revert_weight_conversion(self.model, dict(zip(self.sources, tensors, strict=True)))
        return [made[name] for name in self.shapes]


def conversions(model: PreTrainedModel, shapes: Mapping[str, Sequence[int]]) -> list[TensorConversion]:
    """Return the conversions that together store tensors of these names and ``shapes`` in memory, one tensor each.

    Tensors that only together make one of the file are in one conversion, the last.
    """
    empty = {name: torch.empty(tuple(shape), device="meta") for name, shape in shapes.items()}
    stored = _shapes(revert_weight_conversion(model, dict(empty)))
    found, together = [], []
    for name, tensor in empty.items():
        alone = revert_weight_conversion(model, {name: tensor})
        if any(stored.get(key) != shape for key, shape in _shapes(alone).items()):
            together.append(name)
            continue
        unchanged = [each is tensor for each in alone.values()] == [True]
        found.append(TensorConversion([name], _shapes(alone), None if unchanged else model))
    if together:
        rest = {name: shape for name, shape in stored.items() if not any(name in each.shapes for each in found)}
        found.append(TensorConversion(together, rest, model))
    return found


def _shapes(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
