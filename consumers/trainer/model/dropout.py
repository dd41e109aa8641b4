"""Models in training mode without dropout: the trainer's log-probabilities must be those of the generators.

Dropout is not only a layer: many models hand a number to a function (OPT's layers, every attention). Routers of
experts may add noise of their own. All such numbers are set to 0 in the model's modules, and whether nothing random is
left is tried out. The model's configuration keeps them, for training elsewhere.
"""

from __future__ import annotations

import re
from typing import TypeVar

import torch
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel

from schemas.errors import ConfigError

Model = TypeVar("Model", bound=PreTrainedModel)

TOKENS = 64
"""Length of the sequence on which it is tried out."""
_RANDOM = re.compile(r"drop|jitter")


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
    if not _is_deterministic(model):
        raise ConfigError(
            f"model.path {path!r} cannot be trained: two forward passes of {type(model).__name__} over the same tokens"
            " differ, so it has dropout or other noise that Tidemill cannot switch off; set it to 0 in the model's"
            " config.json"
        )
    return model


@torch.no_grad()
def _is_deterministic(model: PreTrainedModel) -> bool:
    """Try whether two passes in the present mode give the same logits; True if there are no weights yet."""
    if model.device.type == "meta":
        return True
    config = model.config.get_text_config()
    length = min(TOKENS, getattr(config, "max_position_embeddings", None) or TOKENS)
    tokens = torch.arange(1, length + 1, device=model.device)[None] % config.vocab_size
    first, second = (model(input_ids=tokens, use_cache=False).logits for _ in range(2))
    return torch.equal(first, second)
