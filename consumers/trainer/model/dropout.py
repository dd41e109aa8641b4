"""Models in training mode without dropout: the trainer's log-probabilities must be those of the generators.

Dropout is not only a layer: many models hand a number to a function (OPT's layers, every attention). Routers of
experts may add noise of their own. All such numbers are set to 0 in the model's modules, and whether nothing random is
left is tried out. The model's configuration keeps them, for training elsewhere.
"""

from __future__ import annotations

import re
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel

from schemas.errors import ConfigError

Model = TypeVar("Model", bound=PreTrainedModel)

TOKENS = 64
"""Length of the sequence on which it is tried out."""
_RANDOM = re.compile(r"drop|jitter")


@torch.no_grad()
def train_without_dropout(model: Model, path: str) -> Model:
    """Put a model into training mode with nothing random in its forward pass; returns it.

    ConfigError, which names model.path, if two forward passes still differ.
    """
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and _RANDOM.search(name):
                setattr(module, name, 0.0)
    model.train()
    if model.device.type == "meta":
        return model
    tokens = probe_tokens(model)
    first, second = (model(input_ids=tokens, use_cache=False).logits for _ in range(2))
    if bool(first.isnan().any()):
        raise ConfigError(
            f"model.path {path!r} cannot be trained: {type(model).__name__} gives logits that are not numbers, so its"
            " weights are broken, or model.dtype is too narrow for them"
        )
    if not torch.equal(first, second):
        raise ConfigError(
            f"model.path {path!r} cannot be trained: two forward passes of {type(model).__name__} over the same tokens"
            " differ, so it has dropout or other noise that Tidemill cannot switch off; set it to 0 in the model's"
            " config.json"
        )
    return model


def probe_tokens(model: PreTrainedModel) -> Tensor:
    """Return the tokens on which a loaded model is tried out: int64 [1, T]."""
    config = model.config.get_text_config()
    length = min(TOKENS, getattr(config, "max_position_embeddings", None) or TOKENS)
    return torch.arange(1, length + 1, device=model.device)[None] % config.vocab_size
