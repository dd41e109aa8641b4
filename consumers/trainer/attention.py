"""Causal attention within each of several sequences that lie one after the other: which kernel, and each of them.

On a GPU in a 16-bit type it is that of the package flash_attn where it is installed, else PyTorch's own variable-length
one. Elsewhere it is one causal call a sequence, which on a CPU is by far the fastest exact way: a block-diagonal mask
computes every pair, and flex attention has no backward there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Literal, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

Name: TypeAlias = Literal["flash_attn", "varlen", "each"]
Kernel: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, int, float | None], Tensor]
"""query [1, H, N, D]; key and value [1, H or fewer, N, D]; starts of the R sequences int32 [R+1], and N; length of the
longest; scale of the scores, 1/sqrt(D) when None. Returns [1, N, H, D]."""

OLDEST_GPU = (8, 0)
"""Compute capability from which on both flash kernels work."""


def choose(device: torch.device, dtype: torch.dtype) -> Name:
    """The best kernel here for these tensors."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return "each"
    if torch.cuda.get_device_capability(device) < OLDEST_GPU:
        return "each"
    return "flash_attn" if _installed("flash_attn") else "varlen"


@cache
def _installed(package: str) -> bool:
    return find_spec(package) is not None


def _flash_attn(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float | None) -> Tensor:
    """The kernel of the package flash_attn, which takes grouped heads as they are (arXiv:2307.08691)."""
    from flash_attn import flash_attn_varlen_func

    out = flash_attn_varlen_func(
        *_flat(query, key, value), starts, starts, longest, longest, softmax_scale=scale, causal=True
    )
    return cast(Tensor, out)[None]


def _varlen(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float | None) -> Tensor:
    out = varlen_attn(
        *_flat(query, key, value),
        starts,
        starts,
        longest,
        longest,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=_grouped(query, key),
    )
    return cast(Tensor, out)[None]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _each(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float | None) -> Tensor:
    """Not compiled: how many sequences there are would be a part of the program."""
    lengths = [end - start for start, end in pairwise(starts.tolist())]
    parts = zip(*(tensor.split(lengths, 2) for tensor in (query, key, value)), strict=True)
    found = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=_grouped(query, key))
        for q, k, v in parts
    ]
    return torch.cat(found, dim=2).transpose(1, 2)


def _flat(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[N, H, D] each."""
    return query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)


def _grouped(query: Tensor, key: Tensor) -> bool:
    return key.shape[1] != query.shape[1]


KERNELS: dict[Name, Kernel] = {"flash_attn": _flash_attn, "varlen": _varlen, "each": _each}
