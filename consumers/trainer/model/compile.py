"""The model's layers, compiled: fewer and larger kernels for the same computation.

Each layer is compiled by itself, so that one compilation serves all and works with activation checkpointing and FSDP2.
Numbers of tokens are symbols: a batch of another size is not compiled again.
"""

import os
import shutil
from importlib.util import find_spec

import structlog
from torch import nn

CXX = ("g++", "clang++")
CC = ("gcc", "clang", "cc")

log = structlog.get_logger()


def compile_layers(model: nn.Module, device: str) -> int:
    """Compile each layer for this device, before the model is sharded; return their number, 0 without a compiler."""
    lacking = what_lacks(device)
    if lacking is not None:
        log.warning(f"trainer.compile is left out: {lacking}")
        return 0
    kinds = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    for layer in layers:
        layer.compile(dynamic=True)
    return len(layers)


def what_lacks(device: str) -> str | None:
    """Name what has to be installed before anything can be compiled for this device; None if nothing."""
    if device == "cpu":
        return None if _found("CXX", CXX) else "it needs a C++ compiler (Debian, Ubuntu: apt install g++)"
    if find_spec("triton") is None:
        return "it needs Triton (pip install triton)"
    return None if _found("CC", CC) else "Triton needs a C compiler (Debian, Ubuntu: apt install gcc)"


def _found(variable: str, names: tuple[str, ...]) -> bool:
    return any(shutil.which(name) for name in (os.environ.get(variable), *names) if name)
