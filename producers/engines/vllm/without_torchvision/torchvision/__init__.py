"""A stand-in for torchvision if vLLM runs without it, as on a CPU: everything can be imported, nothing can be used.

vLLM's modules for Qwen's vision models import transformers' image processors, which need torchvision. We cut patches
ourselves (schemas/images/), so none of it is called. The registry's torchvision does not work with PyTorch's CPU
build: it is linked to CUDA.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.0"
_MODULES = ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional")


class _Names(type):
    """A metaclass of classes that have every attribute: ``InterpolationMode.BICUBIC``."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Absent(ModuleType):
    """A module, or a function in one, that can be imported but not used."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # A class, because annotations use it in unions.
        return _Names(name, (), {}) if name[0].isupper() else _Absent(f"{self.__name__}.{name}")

    def __call__(self, *args: object, **settings: object) -> Any:
        raise ImportError(f"{self.__name__} was called, and torchvision is not installed")


def _make() -> None:
    for name in _MODULES:
        module = _Absent(f"{__name__}.{name}")
        module.__spec__ = ModuleSpec(module.__name__, None, is_package=True)
        sys.modules[module.__name__] = module
        parent, _, last = module.__name__.rpartition(".")
        setattr(sys.modules[parent], last, module)


_make()
