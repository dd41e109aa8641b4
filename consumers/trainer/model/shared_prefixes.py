"""Shared prefixes: tokens that several sequences begin with are computed once.

The samples of a prompt begin with the same tokens, and calls of an agent with the same conversation. In a causal model
a token's state depends on itself and what is before it, so that it is the same in all of them: whatever works on each
token alone (projections, norms, the MLP) needs it once. Attention is given all tokens of all sequences again.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from consumers.trainer.data.load_balancing import WORTH_IT


class _Repeat(torch.autograd.Function):
    """Values at ``index`` in dimension ``dim``, some of them many times; their gradients are added up in float32."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, dim: int, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.dim, ctx.size = dim, values.shape[dim]
        return values.index_select(dim, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (index,), (gradient,) = ctx.saved_tensors, gradients
        shape = [*gradient.shape[: ctx.dim], ctx.size, *gradient.shape[ctx.dim + 1 :]]
        # In 16 bits a sum of many stops growing.
        precise = torch.promote_types(gradient.dtype, torch.float32)
        total = torch.zeros(shape, dtype=precise, device=gradient.device)
        return total.index_add_(ctx.dim, index, gradient.to(precise)).to(gradient.dtype), None, None


class SharedPrefixes(NamedTuple):
    """M distinct tokens among the N of packed sequences.

    spread: int64 [N], which of the distinct ones each token is. first: int64 [M], one of the N tokens that it is.
    """

    spread: Tensor
    first: Tensor

    def to_all(self, values: Tensor, dim: int, own: Tensor | None = None) -> Tensor:
        """Values of the distinct tokens, M in dimension ``dim``, at all N or those that ``own``, bool [N], marks."""
        index = self.spread if own is None else self.spread[own]
        # PyTorch gives apply no types.
        return cast(Tensor, _Repeat.apply(values, dim, index))  # type: ignore[no-untyped-call]

    def to_distinct(self, values: Tensor, dim: int) -> Tensor:
        """Values of all N tokens in dimension ``dim``, at the M distinct ones."""
        return values.index_select(dim, self.first)


@torch.no_grad()
def find_shared_prefixes(inputs: Tensor, lengths: Tensor) -> SharedPrefixes | None:
    """Find what the rows share; None when that is less than WORTH_IT of them.

    inputs: int64 [R, T], right-padded, of which the first ``lengths``, int64 [R], count. The tokens are numbered as
    they are packed: row after row, without padding.
    """
    place = torch.arange(inputs.shape[1], device=inputs.device)
    there = place < lengths[:, None]
    # Rows with the longest common prefix are neighbours in this order.
    order = torch.unique(inputs.masked_fill(~there, -1), dim=0, return_inverse=True)[1].argsort()
    ids, known = inputs[order], there[order]
    same = (ids[1:] == ids[:-1]) & known[1:] & known[:-1]
    shared = F.pad(same.cumprod(1).sum(1), (1, 0))
    # A token is that of the last row at or above its own whose prefix with the one before ended earlier.
    row = torch.arange(len(ids), device=inputs.device)[:, None]
    owner = torch.where(place >= shared[:, None], row, 0).cummax(0).values
    number = (there.flatten().cumsum(0) - 1).view_as(there)
    same_as = torch.empty_like(number)
    same_as[order] = number[order].gather(0, owner)
    found = same_as[there]
    is_first = found == torch.arange(len(found), device=inputs.device)
    if len(found) - int(is_first.sum()) < WORTH_IT * len(found):
        return None
    return SharedPrefixes((is_first.cumsum(0) - 1)[found], is_first.nonzero()[:, 0])
