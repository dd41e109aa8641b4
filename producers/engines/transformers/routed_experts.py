"""The choices of a mixture's routers in the engine's last forward pass, for training to repeat."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from producers.engines.routed_experts import mixture_sizes

_LAYER = re.compile(r"\blayers\.(\d+)\.")


class RoutedExpertsRecorder:
    """Records the tokens that each layer's experts get. ConfigError for a model without experts."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config().to_dict()
        self._layers, _, self._dtype = mixture_sizes(config, type(model).__name__)
        self._chosen: dict[int, Tensor] = {}
        for name, module in model.named_modules():
            layer = _LAYER.search(f"{name}.")
            if layer is not None and any(p.ndim == 3 for p in module.parameters(recurse=False)):
                module.register_forward_pre_hook(self._hook(int(layer[1])), with_kwargs=True)

    def _hook(self, layer: int) -> Callable[..., None]:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            values = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            chosen = next((value for value in values if value.dtype == torch.int64), None)
            if chosen is not None:
                self._chosen[layer] = chosen

        return note

    def take(self, rows: int) -> npt.NDArray[Any]:
        """Return the choices of the last pass over ``rows`` rows, uint8 or uint16 [rows, T, L, k]."""
        first = next(iter(self._chosen.values()))
        out = np.full((*first.shape[:1], self._layers, *first.shape[1:]), np.iinfo(self._dtype).max, self._dtype)
        for layer, chosen in self._chosen.items():
            out[:, layer] = chosen.cpu().numpy()
        self._chosen.clear()
        choices: npt.NDArray[Any] = out.reshape(rows, -1, *out.shape[1:])
        return choices
