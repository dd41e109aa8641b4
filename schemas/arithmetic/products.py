"""Matrix products of a fixed shape: the numbers of a token do not depend on how many others are computed with it.

A library chooses the order of a sum by the shapes of a product, so that a token beside 3 others has other last bits
than beside 300. Here each product has ``TILE`` rows, filled up with zeros, whatever there is to compute. What works on
each element alone has no such choice, but on a CPU the end of a tensor that fills no vector is computed by other
instructions: hence passes of whole tiles, and at most ``THREADS`` threads, whose parts then end with a vector.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from schemas.errors import ConfigError

if TYPE_CHECKING:  # loading it takes seconds, and a policy of model.kind mlp does without
    from transformers import PreTrainedModel

TILE = 32
"""Tokens of a product. A pass has a multiple of it."""
THREADS = 2
"""Most threads of a pass on a CPU."""
ROTARY = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies depend on the longest sequence of a pass."""


def fill(values: Tensor, filler: float = 0) -> Tensor:
    """Append ``filler`` to values [N, ...] up to whole tiles."""
    missing = -len(values) % TILE
    return F.pad(values, (0, 0) * (values.ndim - 1) + (0, missing), value=filler) if missing else values


def multiply(features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``features`` [..., I] times ``weight`` [O, I] plus ``bias`` [O], a tile of rows at a time."""
    # PyTorch gives apply no types.
    return cast(Tensor, _Product.apply(features, weight, bias))  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    """``multiply``; its gradient has no fixed shape, since nothing is compared with it."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(features, weight)
        rows = features.reshape(-1, features.shape[-1])
        count, rows = len(rows), fill(rows)
        found = rows.new_empty(len(rows), len(weight))
        for tile, out in zip(rows.split(TILE), found.split(TILE), strict=True):
            torch.mm(tile, weight.t(), out=out)
        if bias is not None:
            found += bias
        return found[:count].view(*features.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        features, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        of_features, of_weight, of_bias = ctx.needs_input_grad
        return (
            gradient @ weight if of_features else None,
            flat.t() @ features.reshape(-1, features.shape[-1]) if of_weight else None,
            flat.sum(0) if of_bias else None,
        )


def use_fixed_products(model: PreTrainedModel) -> None:
    """Have a model's layers multiply by ``multiply``; ConfigError if it has weights that are multiplied elsewhere."""
    where = f"generator.exact: {type(model).__name__}"
    for name, module in model.named_modules():
        if getattr(module, "rope_type", None) in ROTARY:
            raise ConfigError(f"{where} has rotary embeddings that depend on the longest sequence of a pass")
        matrices = any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))
        if type(module) is nn.Linear:
            module.forward = partial(_forward, module)  # type: ignore[method-assign]
        elif matrices and not isinstance(module, nn.Embedding):
            raise ConfigError(
                f"{where} multiplies by the weights of {name}, a {type(module).__name__}: only linear layers can"
                " have products of a fixed shape"
            )
    if next(model.parameters()).device.type == "cpu":
        torch.set_num_threads(min(THREADS, torch.get_num_threads()))


def _forward(module: nn.Linear, features: Tensor) -> Tensor:
    return multiply(features, module.weight, module.bias)


def distributions(features: Tensor, head: Any, temperatures: Tensor) -> Iterator[Tensor]:
    """Yield log-probabilities of a tile of tokens each, float32 [TILE, V], as training computes them.

    features: last hidden states [N, H]. head: the output layer. temperatures: float32 [N].
    """
    for tile, scale in zip(fill(features).split(TILE), fill(temperatures, 1.0).split(TILE), strict=True):
        logits = F.linear(tile, head.weight, head.bias).float().div_(scale[:, None])
        yield logits.sub_(torch.logsumexp(logits, -1)[:, None])
