"""Which weights of a model are in another type than the rest: in float32 where it has 16 bits, or in 4 bits."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:  # importing it takes seconds, and model.kind mlp does not need it
    from transformers import PreTrainedModel


def language_model_of(model: nn.Module) -> PreTrainedModel | None:
    """Return the language model within ``model``, if there is one."""
    from transformers import PreTrainedModel

    return next((each for each in model.modules() if isinstance(each, PreTrainedModel)), None)


def dtype_rule(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], torch.dtype]:
    """Return the rule by which a tensor of the model is stored: in ``dtype``, or in float32 if the model asks for it.

    Buffers (an expert's routing bias, say) and what transformers loads in float32 in any case are small, are computed
    with in float32 by engines as well, and would lose their differences in 16 bits. Integers stay as they are.
    """
    buffers = {name: torch.float32 if each.is_floating_point() else each.dtype for name, each in model.named_buffers()}
    modules = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        modules |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    kept = re.compile("|".join(rf"(?:^|\.){re.escape(each)}(?:\.|$)" for each in modules) or r"(?!)")

    def rule(name: str) -> torch.dtype:
        return buffers.get(name, torch.float32 if kept.search(name) else dtype)

    return rule


def is_quantised(weight: Tensor) -> bool:
    """Return whether a weight has 4 bits of bitsandbytes: uint8 [elements / 2, 1], with its scales beside it."""
    return getattr(weight, "quant_state", None) is not None


def dequantise(weight: Tensor) -> Tensor:
    """Return a weight in 4 bits as it is computed with, in the shape of its layer; another one as it is."""
    if not is_quantised(weight):
        return weight
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, weight.quant_state)  # type: ignore[attr-defined]


def layer_shape(weight: Tensor) -> tuple[int, ...]:
    """Return a weight's shape; if it is quantised, the shape that it had before."""
    return tuple(weight.quant_state.shape if is_quantised(weight) else weight.shape)  # type: ignore[attr-defined]


def in_full_precision(model: nn.Module) -> list[nn.Module]:
    """Return the modules, such as routers, that transformers computes in float32 though the rest is in 16 bits.

    PyTorch's own, such as convolutions, are left out: a model may read their weights past their ``forward``.
    """
    owner = language_model_of(model)
    if owner is None:
        return []
    rule = dtype_rule(owner, torch.bfloat16)
    found: list[nn.Module] = []
    for path, module in owner.named_modules():
        names = [f"{path}.{name}" for name, _ in module.named_parameters()]
        ours = not type(module).__module__.startswith("torch.") and not any(module in each.modules() for each in found)
        if names and ours and all(rule(name) == torch.float32 for name in names):
            found.append(module)
    return found
