"""Context parallelism: the tokens of a micro-batch are cut over ranks, and attention exchanges tokens for heads.

Ulysses (arXiv:2309.14509): for attention, each rank gives away its tokens' heads and gets all tokens of its own heads,
so that any kernel for whole sequences runs unchanged, and exchanges the result back.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from consumers.trainer.distributed.parts import Part


@torch.compiler.disable  # type: ignore[untyped-decorator]
def exchange_to_heads(tensor: Tensor, part: Part) -> Tensor:
    """Exchange tokens for heads: [1, H, N / C, D] to [1, H / C, N, D], for C ranks.

    If there are fewer heads than ranks, as of grouped keys and values, each goes to several: [1, 1, N, D].
    """
    if tensor.shape[1] % part.size:
        tensor = tensor.repeat_interleave(part.size // tensor.shape[1], dim=1)
    out: Tensor = _Exchange.apply(tensor, part, True)  # type: ignore[no-untyped-call]
    return out


@torch.compiler.disable  # type: ignore[untyped-decorator]
def exchange_to_tokens(tensor: Tensor, part: Part) -> Tensor:
    """Exchange back: [1, H / C, N, D] to [1, H, N / C, D]."""
    out: Tensor = _Exchange.apply(tensor, part, False)  # type: ignore[no-untyped-call]
    return out


def gather_tokens(values: Tensor, part: Part) -> Tensor:
    """Gather the ranks' slices [N / C, ...] to [N, ...]; in backward, each rank keeps its slice of the gradient."""
    out: Tensor = _Gather.apply(values, part)  # type: ignore[no-untyped-call]
    return out


class _Exchange(torch.autograd.Function):
    """Both exchanges; the gradient of one is the other."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, part: Part, to_heads: bool) -> Tensor:
        ctx.part, ctx.to_heads = part, to_heads
        return _exchange(tensor, part, to_heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _exchange(grad, ctx.part, not ctx.to_heads), None, None


def _exchange(tensor: Tensor, part: Part, to_heads: bool) -> Tensor:
    _, heads, tokens, width = tensor.shape
    size = part.size
    if to_heads:
        send = tensor[0].reshape(size, heads // size, tokens, width).contiguous()
    else:
        send = tensor[0].reshape(heads, size, tokens // size, width).transpose(0, 1).contiguous()
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=part.group)
    if to_heads:
        # Of each rank its tokens, of this rank's heads.
        return received.transpose(0, 1).reshape(1, heads // size, size * tokens, width)
    return received.reshape(1, size * heads, tokens // size, width)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, part: Part) -> Tensor:
        ctx.part = part
        out = values.new_empty((part.size * values.shape[0], *values.shape[1:]))
        dist.all_gather(list(out.chunk(part.size)), values.contiguous(), group=part.group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.part.slice(grad), None
