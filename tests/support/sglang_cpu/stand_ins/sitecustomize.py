"""Makes PyPI's torchvision importable beside a CPU build of PyTorch, where its operators, linked to CUDA, don't load.

SGLang imports it and uses its transforms at most. Declaring the two operators that the import asks for is enough.
"""

import importlib.abc
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _OperatorsFirst(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            sys.modules["torchvision_operators"] = operators = ModuleType("torchvision_operators")
            operators.library = library = torch.library.Library("torchvision", "DEF")  # type: ignore[attr-defined]
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, _OperatorsFirst())
