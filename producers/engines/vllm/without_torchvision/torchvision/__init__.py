"""Stands in for torchvision where vLLM runs without it, as on a CPU: all of it can be imported, and nothing used.

vLLM's modules of Qwen's vision models import transformers' image processors, which are written with torchvision. We
make patches ourselves (schemas/images/), so nothing of it is ever called. The registry's torchvision can't be had
beside PyTorch's CPU build: it is linked to CUDA.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.0"
_MODULES = ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional")


class _Names(type):
    """Classes whose attributes are there, too: ``InterpolationMode.BICUBIC``."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Absent(ModuleType):
    """A module, or a function of one, that can be imported and not used."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # A class, since annotations join them with others.
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
