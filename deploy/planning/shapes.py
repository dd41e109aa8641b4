"""Tensors of shape and type without data: a model of any size computes on them, and every byte is counted.

Numbers that decide shapes (token ids, masks, lengths) are real; weights and activations are fake tensors. Whatever
asks a fake tensor for its value gets one: the step continues as it does with finite losses.
"""

import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from deploy.planning.work import WorkLedger

_aten: Any = torch.ops.aten
_INDEXED = (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_)
_TRAINER = "/consumers/trainer/"
_WAITING = {"_local_scalar_dense", "bincount", "equal", "masked_select", "nonzero", "_unique2", "unique_dim"}
"""Operators whose result, or its size, the host must know. With masks as indices others are among them."""
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

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of tensors as nothing: they are in main memory."""
        for tensor in tensors:
            self._sizes[tensor.untyped_storage()._cdata] = 0

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

    work: what has been done so far. waits: functions of the trainer, by file, that asked for a value: on a GPU the host
    waits there until the device has done all before it.
    """

    def __init__(self, fake: FakeTensorMode, ledger: MemoryLedger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake, self._ledger = fake, ledger
        self.work = WorkLedger()
        self.waits: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        if any(isinstance(leaf, DTensor) for leaf in leaves):
            return NotImplemented
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        faked = any(isinstance(leaf, FakeTensor) for leaf in tensors)
        # A buffer for weights or activations is made of nothing. What another rank would have sent is not known.
        faked |= not tensors and kwargs.get("dtype") in _COMPUTED
        faked |= func is _aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None
        if _waits(func, args):
            self._note_wait()
        out = self._on_shapes(func, args, kwargs) if faked else func(*args, **kwargs)
        self.work.note(func, args, kwargs, out)
        self._ledger.add(tree_leaves(out))
        return out

    def _note_wait(self) -> None:
        """Note the function of the trainer that is being run, if there is one."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _TRAINER not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is not None:
            file = frame.f_code.co_filename.rpartition(_TRAINER)[2]
            self.waits.add(f"{file} {frame.f_code.co_name}")

    @contextmanager
    def watch_reads(self) -> Iterator[None]:
        """Note tensors that are read as lists and arrays, which no operator shows; experts get as many tokens each."""
        tolist, numpy = Tensor.tolist, Tensor.numpy

        def as_list(tensor: Tensor) -> Any:
            # The counter of FLOPs reads lengths, a kernel does not.
            if not sys._getframe(1).f_code.co_filename.endswith("flop_counter.py"):
                self._note_wait()
            return _dealt_evenly(sys._getframe(1)) or tolist(tensor)

        def as_array(tensor: Tensor, **options: Any) -> Any:
            self._note_wait()
            return np.ones(tuple(tensor.shape)) if isinstance(tensor, FakeTensor) else numpy(tensor, **options)

        Tensor.tolist, Tensor.numpy = as_list, as_array  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            Tensor.tolist, Tensor.numpy = tolist, numpy  # type: ignore[method-assign]

    def _on_shapes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _aten._local_scalar_dense.default:
            return torch.ones((), dtype=args[0].dtype).item()
        if func is _aten.equal.default:
            return True
        if func is _aten.repeat_interleave.Tensor:
            args, func = (args[0], [kwargs["output_size"]]), _aten.new_zeros.default
            kwargs = {}
        elif func is _aten.bincount.default:
            args, func = (args[0], [args[2] if len(args) > 2 else kwargs["minlength"]]), _aten.new_zeros.default
            kwargs = {"dtype": torch.int64}
        elif func is _aten.masked_scatter_backward.default:
            args, func = (args[0], args[2]), _aten.new_zeros.default
        elif func is _aten.masked_select.default:
            args, func = (args[0], [args[1].expand(args[0].shape)]), _aten.index.Tensor
        packet = func._overloadpacket
        if packet is _aten._grouped_mm and args[0].dtype != torch.bfloat16:
            # PyTorch describes its shapes in this type only.
            dtype = args[0].dtype
            args = tree_map_only(FakeTensor, lambda t: t.bfloat16() if t.is_floating_point() else t, args)
            with self._fake:
                return func(*args, **{**kwargs, "out_dtype": None}).to(dtype)
        if packet in _INDEXED:
            # How many places a mask marks decides a shape, so it must be real.
            args = (args[0], [part for index in args[1] for part in _places(index)], *args[2:])
        with self._fake:
            return func(*args, **kwargs)


class SavedAway(torch.autograd.graph.saved_tensors_hooks):
    """Stands for ``torch.autograd.graph.save_on_cpu``: what is saved takes none of the card's memory."""

    def __init__(self, pin_memory: bool = False) -> None:
        super().__init__(_leave, _bring_back)


def _leave(tensor: Tensor) -> Any:
    return (tensor.shape, tensor.dtype) if isinstance(tensor, FakeTensor) and tensor.is_floating_point() else tensor


def _bring_back(saved: Any) -> Tensor:
    return saved if isinstance(saved, Tensor) else torch.empty(saved[0], dtype=saved[1])


def _places(index: Tensor | None) -> tuple[Tensor | None, ...]:
    masked = _is_mask(index) and not isinstance(index, FakeTensor)
    return index.nonzero(as_tuple=True) if masked and index is not None else (index,)


def _waits(func: Any, args: tuple[Any, ...]) -> bool:
    packet = func._overloadpacket
    return packet.__name__ in _WAITING or (packet in _INDEXED and any(_is_mask(index) for index in args[1]))


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _dealt_evenly(frame: FrameType) -> list[list[int]] | None:
    """Return how many tokens a rank sends to each rank with experts, and gets; None if ``frame`` does not ask for it.

    It is transformers' function of that name that asks, and which expert a token goes to is not known.
    """
    if frame.f_code.co_name != "_dispatch_tokens":
        return None
    tokens, ranks = len(frame.f_locals["send_tokens"]), frame.f_locals["ep_size"]
    return 2 * [[tokens // ranks + (rank < tokens % ranks) for rank in range(ranks)]]
