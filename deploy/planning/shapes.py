"""Tensors of shape and type without data: a model of any size computes on them, and every byte is counted.

Numbers that decide shapes (token ids, masks, lengths) are real; weights and activations are fake tensors. Whatever
asks a fake tensor for its value gets one: the step continues as it does with finite losses.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from deploy.planning.work import WorkLedger

_aten: Any = torch.ops.aten
_COMPUTED = (torch.float32, torch.bfloat16, torch.float16)


class MemoryLedger:
    """The bytes of all storages that are alive. peak: the most since ``restart``."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self.live = self.peak = 0

    def restart(self) -> None:
        """Count the peak from now on."""
        self.peak = self.live

    def add(self, tensors: Iterable[Any]) -> None:
        """Count the storages of tensors, each once."""
        for tensor in tensors:
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._sizes:
                    self._sizes[key] = 0
                    weakref.finalize(storage, self._forget, key)
                    self._resize(key, storage.nbytes())

    def _resize(self, key: int, size: int) -> None:
        self.live += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)

    @contextmanager
    def watch_resizes(self) -> Iterator[None]:
        """Count what FSDP2 frees and allocates again by resizing storages."""
        resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            answer = resize(storage, size)
            if storage._cdata in self._sizes:
                self._resize(storage._cdata, size)
            return answer

        torch.UntypedStorage.resize_ = counted  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


class ShapesOnly(TorchDispatchMode):
    """Runs operators on fake tensors where weights take part, and on real ones where only ids and masks do.

    work: what has been done so far.
    """

    def __init__(self, fake: FakeTensorMode, ledger: MemoryLedger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake, self._ledger = fake, ledger
        self.work = WorkLedger()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        if any(isinstance(leaf, DTensor) for leaf in leaves):
            return NotImplemented
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        faked = any(isinstance(leaf, FakeTensor) for leaf in tensors)
        if not tensors and kwargs.get("dtype") in _COMPUTED:
            # A buffer for weights or activations that is made of nothing.
            faked = True
        out = self._on_shapes(func, args, kwargs) if faked else func(*args, **kwargs)
        self.work.note(func, args, kwargs, out)
        self._ledger.add(tree_leaves(out))
        return out

    def _on_shapes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _aten._local_scalar_dense.default:
            return torch.ones((), dtype=args[0].dtype).item()
        if func is _aten.equal.default:
            return True
        if func is _aten.bincount.default:
            args, func = (args[0], [args[2] if len(args) > 2 else kwargs["minlength"]]), _aten.new_zeros.default
            kwargs = {"dtype": torch.int64}
        elif func is _aten.masked_scatter_backward.default:
            args, func = (args[0], args[2]), _aten.new_zeros.default
        elif func is _aten.masked_select.default:
            args, func = (args[0], [args[1].expand(args[0].shape)]), _aten.index.Tensor
        packet = func._overloadpacket
        if packet is _aten._grouped_mm and args[0].dtype != torch.bfloat16:
            # PyTorch describes its shapes in this type only.
            dtype, args = args[0].dtype, tree_map_only(FakeTensor, _in_bfloat16, args)
            with self._fake:
                return func(*args, **{**kwargs, "out_dtype": None}).to(dtype)
        if packet in (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_):
            # How many places a mask marks decides a shape, so it must be real.
            args = (args[0], [part for index in args[1] for part in _places(index)], *args[2:])
        with self._fake:
            return func(*args, **kwargs)


def _in_bfloat16(tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


def _places(index: Tensor | None) -> tuple[Tensor | None, ...]:
    masked = index is not None and index.dtype in (torch.bool, torch.uint8) and not isinstance(index, FakeTensor)
    return index.nonzero(as_tuple=True) if masked and index is not None else (index,)
