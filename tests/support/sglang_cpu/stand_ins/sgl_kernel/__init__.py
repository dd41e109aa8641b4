"""Stands in for SGLang's CUDA kernels, which nothing calls on a CPU with PyTorch's attention: calling one fails."""

from typing import Any, NoReturn


class _Kernel:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"the kernel {self._name} was called, for which there is only a stand-in")

    def __getattr__(self, name: str) -> "_Kernel":
        return _kernel(f"{self._name}.{name}")


def _kernel(name: str) -> _Kernel:
    if name.rpartition(".")[2].startswith("__"):
        raise AttributeError(name)
    return _Kernel(name)


def __getattr__(name: str) -> _Kernel:
    return _kernel(name)
