"""A GPU that this machine does not have: tensors say that they are on it, and compute on the CPU.

An operation that PyTorch refuses on a GPU is refused here, too: one with tensors of both devices, one that draws for
the GPU with the CPU's generator, and ``numpy()`` of what is on the GPU.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import pytest
import torch
from accelerate.state import PartialState
from torch import Tensor
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _DummyPrivateUse1Hook,
    _setup_privateuseone_for_python_backend,
)

from consumers.trainer.distributed import parts

aten = torch.ops.aten


class _Event:
    """A moment of a stream, which has passed."""


class _Stream(torch.cpu.Stream):
    def synchronize(self) -> None:
        """Return: what is computed is there."""

    def record_event(self, event: object = None) -> _Event:
        return _Event()


class _Module(_DummyBackendModule):
    """PyTorch's module of the device, which is there only while a test pretends it."""

    pretended = False

    def is_available(self) -> bool:
        return self.pretended

    Stream = _Stream

    def current_stream(self, device: object = None) -> _Stream:
        return _Stream()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


class _Hook(_DummyPrivateUse1Hook):
    def is_available(self) -> bool:
        return _MODULE.pretended


_MODULE = _Module()
_setup_privateuseone_for_python_backend("pretended", _MODULE, _Hook())
GPU = torch.device("pretended", 0)

_TAKE_BOTH = {aten.copy_, aten._to_copy, aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
"""Operations for which it is enough that the first tensor is on the GPU, or that copy between devices."""


class _Storage:
    """The memory below a tensor on the GPU, which is ``held``, that of the CPU."""

    device = GPU

    def __init__(self, held: torch.UntypedStorage) -> None:
        self.held = held

    def __getattr__(self, name: str) -> Any:
        return getattr(self.held, name)

    def __len__(self) -> int:
        return len(self.held)


class _OnGpu(Tensor):
    """A tensor of the CPU, ``held``, that says it is on the GPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Self:
        made = Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=GPU
        )
        made.held = held
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Mapping[str, Tensor], *_: object) -> Self:
        return cls(inner["held"])

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})

    def untyped_storage(self) -> Any:
        """Return the memory below the tensor, which may be resized."""
        return _Storage(self.held.untyped_storage())

    # PyTorch's own takes memory of a kind that this device has not.
    def set_(self, source: _Storage) -> Self:  # type: ignore[override]
        """Return an empty tensor's view of all of the memory."""
        return type(self)(self.held.set_(source.held))

    def tolist(self) -> Any:
        """Return the values, which PyTorch does not do for tensors of other classes."""
        return self.held.tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"_OnGpu({self.held!r})"


def _compute(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
    on_gpu = any(isinstance(each, _OnGpu) for each in tensors)
    _refuse_both(func, tensors, on_gpu)
    if func.overloadpacket is aten._fused_sdp_choice:
        return SDPBackend.MATH.value
    device = kwargs.get("device")
    made_on_gpu = on_gpu if device is None else torch.device(device).type == GPU.type
    if made_on_gpu and (generator := kwargs.get("generator")) is not None and generator.device.type == "cpu":
        raise RuntimeError(f"{func}: Expected a {GPU.type!r} device type for generator but found 'cpu'")
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    if device is not None and made_on_gpu:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if func.overloadpacket is aten._to_copy and on_gpu != made_on_gpu:
        made = func(*_held(args), **{name: value for name, value in _held(kwargs).items() if name != "device"})
        return _OnGpu(made) if made_on_gpu else made
    if func.overloadpacket is aten.histc and on_gpu:  # The CPU counts no integers.
        made = func(args[0].held.float(), *args[1:], **kwargs).to(args[0].dtype)
    else:
        made = func(*_held(args), **_held(kwargs))
    if not made_on_gpu:
        return made
    made = tree_map(lambda each: _OnGpu(each) if isinstance(each, Tensor) else each, made)
    return return_and_correct_aliasing(func, args, kwargs, made) if on_gpu else made


def _held(values: Any) -> Any:
    return tree_map(lambda each: each.held if isinstance(each, _OnGpu) else each, values)


def _refuse_both(func: Any, tensors: Sequence[Tensor], on_gpu: bool) -> None:
    if not on_gpu or func.namespace not in ("aten", "prims"):
        return
    if func.overloadpacket in _TAKE_BOTH and (isinstance(tensors[0], _OnGpu) or "copy" in func.__name__):
        return
    written = func._schema.is_mutable and not isinstance(tensors[0], _OnGpu)
    if written or any(not isinstance(each, _OnGpu) and each.dim() > 0 for each in tensors):
        places = [f"{each.device} {list(each.shape)}" for each in tensors]
        raise RuntimeError(f"{func}: Expected all tensors to be on the same device, but found {', '.join(places)}")


# PyTorch calls these four without the class where it makes a tensor of lists, or of tensors.
@torch.library.impl("aten::empty.memory_format", "PrivateUse1")
def _empty(size: Sequence[int], **kwargs: Any) -> Tensor:
    return _OnGpu(aten.empty.memory_format(size, **{**kwargs, "device": torch.device("cpu")}))


@torch.library.impl("aten::empty_strided", "PrivateUse1")
def _empty_strided(size: Sequence[int], stride: Sequence[int], **kwargs: Any) -> Tensor:
    return _OnGpu(aten.empty_strided.default(size, stride, **{**kwargs, "device": torch.device("cpu")}))


@torch.library.impl("aten::_copy_from", "PrivateUse1")
def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _held(target).copy_(_held(source))
    return target


@torch.library.impl("aten::_local_scalar_dense", "PrivateUse1")
def _read(source: Tensor) -> Any:
    return _held(source).item()


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Let ``tensor.data = other`` take what the other tensor holds."""

    def __torch_function__(self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is Tensor.data.__set__ and isinstance(args[1], _OnGpu):  # type: ignore[attr-defined]
            args[0].held = args[1].held
        return made


@contextmanager
def pretend_gpu(patch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Make a trainer put its models, which must be in float32, on a pretended GPU, which is yielded."""
    patch.setattr(PartialState, "device", GPU, raising=False)
    patch.setattr("accelerate.Accelerator.device", GPU)
    patch.setattr(_MODULE, "pretended", True)
    empty = torch.empty
    patch.setattr(torch, "empty", lambda *size, pin_memory=False, **kwargs: empty(*size, **kwargs))
    patch.setattr("torch.accelerator.synchronize", lambda *_: None)
    patch.setattr("torch.accelerator.empty_cache", lambda: None)
    patch.setattr("torch.accelerator.get_memory_info", lambda *_: (2**40, 2**40))
    stage = StateDictStager._offload_tensor
    patch.setattr(
        StateDictStager,
        "_offload_tensor",
        lambda self, x, *args, **kwargs: x.held.clone() if isinstance(x, _OnGpu) else stage(self, x, *args, **kwargs),
    )
    # A tensor of a real GPU is no wrapper of another.
    patch.setattr(
        parts,
        "is_traceable_wrapper_subclass",
        lambda each: not isinstance(each, _OnGpu) and is_traceable_wrapper_subclass(each),
    )
    # Threads of a device would not have the modes.
    with torch.autograd.set_multithreading_enabled(False), _Functions(), _Dispatch():
        yield GPU


def run_on_gpu(main: Callable[..., object], *arguments: Any) -> None:
    """``main(*arguments)`` on a pretended GPU."""
    with pytest.MonkeyPatch.context() as patch, pretend_gpu(patch):
        main(*arguments)
