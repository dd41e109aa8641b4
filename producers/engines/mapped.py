"""A file of weights in memory without a copy: what can be done before an engine has to stand still for a load."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

PAGE = 4096
"""Bytes; where pages are larger, some are touched more than once."""


def map_tensors(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Tensors of a safetensors file, as views of it, with all their pages read and mapped.

    They stay as they are when the file is deleted. OSError if it can't be opened.
    """
    with safe_open(path, framework="pt", device="cpu") as file:
        tensors = {name: file.get_tensor(name) for name in names}
    for tensor in tensors.values():
        # The copy that follows would stop at each page that this process has not touched.
        tensor.reshape(-1).view(torch.uint8)[::PAGE].sum()
    return tensors
