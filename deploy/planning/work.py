"""The work of a step as its operators are called: FLOPs, bytes of memory, and bytes that collectives move.

It counts fake tensors and real ones alike, so that a count on shapes can be compared with that of a real step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_aten: Any = torch.ops.aten
_COLLECTIVES = ("c10d", "_c10d_functional", "_dtensor")
_KINDS = {
    "allgather": "all-gather",
    "allreduce": "all-reduce",
    "reducescatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
}


@dataclass(frozen=True)
class Collective:
    """A kind of collective among some ranks. ranks: of the group, as they are numbered in the whole process group."""

    kind: str
    ranks: tuple[int, ...]

    def sent(self, message: int) -> int:
        """Return the bytes that a rank sends for a message of so many bytes, with the ring algorithm.

        message: the whole of what is gathered, scattered or reduced; of an exchange, what this rank has.
        """
        part = message * (len(self.ranks) - 1) // len(self.ranks)
        return 2 * part if self.kind == "all-reduce" else part


@dataclass
class WorkLedger:
    """The work of one rank so far: calls of operators by (FLOPs, bytes read and written), and bytes of collectives."""

    operators: Counter[tuple[int, int]] = field(default_factory=Counter)
    messages: Counter[Collective] = field(default_factory=Counter)

    @property
    def flops(self) -> int:
        """Return the FLOPs of all matrix products and attention; causal attention computes half of all pairs."""
        return sum(flops * calls for (flops, _), calls in self.operators.items())

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Count a call of an operator that returned ``out``."""
        if func.namespace not in _COLLECTIVES:
            if not func.is_view:
                self.operators[_flops(func, args, kwargs, out), _moved(func, args, kwargs, out)] += 1
            return
        name = func._overloadpacket.__name__.replace("_", "")
        kind = next((kind for part, kind in _KINDS.items() if part in name), None)
        group = next((found for each in args if (found := _group(each)) is not None), None)
        if kind is not None and group is not None and group.size() > 1:
            ranks = tuple(dist.get_process_group_ranks(group))
            self.messages[Collective(kind, ranks)] += max(_bytes(part) for part in (*args, out))


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    packet = func._overloadpacket
    formula = flop_registry.get(packet) or _FORMULAS.get(packet)
    if formula is None:
        return 0
    flops = int(formula(*args, **kwargs, out_val=out))
    return flops // 2 if "attention" in packet.__name__ or "attn" in packet.__name__ else flops


def _moved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    if "empty" in func._overloadpacket.__name__:
        return 0
    if func is _aten.embedding.default:
        return 2 * _bytes(out)
    written = _bytes(out)
    if not func._schema.returns:
        written = sum(_bytes(arg) for arg, of in zip(args, func._schema.arguments, strict=False) if of.is_write)
    return _bytes((args, kwargs)) + written


def _bytes(value: Any) -> int:
    tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    # An expanded tensor has fewer in memory than elements.
    return sum(min(t.numel() * t.itemsize, t.untyped_storage().nbytes()) for t in tensors)


def _group(value: Any) -> dist.ProcessGroup | None:
    if isinstance(value, torch.ScriptObject) and "ProcessGroup" in value._type().name():  # type: ignore[attr-defined]
        return dist.ProcessGroup.unbox(value)
    name: Any = value if isinstance(value, str) else None
    try:
        return _resolve_process_group(name) if name else None
    except (LookupError, ValueError, RuntimeError):
        return None


def _grouped_products(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """Return the FLOPs of products of rows by experts: 2-D by 3-D, or 2-D by 2-D for the experts' gradients."""
    experts = left.shape[0] if left.ndim > right.ndim else 1
    return 2 * left.numel() * int(right.shape[-1]) // experts


_FORMULAS: dict[Any, Any] = {
    # PyTorch's counter leaves these out.
    _aten._grouped_mm: _grouped_products,
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda query, key, value, *_, **__: sdpa_flop_count(
        query.shape, key.shape, value.shape
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *given, **__: sdpa_backward_flop_count(
        *(tensor.shape for tensor in given[:4])
    ),
}
