"""A tiny mixture of experts with random weights, and what its experts are given in a plain forward pass."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.support.models.tiny_model import make_tokenizer

EXPERTS, K, LAYERS = 8, 2, 3
DENSE = 1
"""The layer without experts."""


def build_mixture(vocabulary: int = 260, **sizes: Any) -> PreTrainedModel:
    """A Qwen3-MoE of three layers, every size of which divides by 2."""
    config: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": EXPERTS,
        "num_experts_per_tok": K,
        "mlp_only_layers": [DENSE],
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**config, **sizes}))


def make_mixture(folder: Path, seed: int = 0, tokenizer: Any = None, **sizes: Any) -> Path:
    """Write one with a tokenizer; returns the folder."""
    tokenizer = tokenizer or make_tokenizer()
    torch.manual_seed(seed)
    build_mixture(max(260, len(tokenizer)), **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def choices(model: PreTrainedModel, ids: Sequence[int]) -> npt.NDArray[Any]:
    """The experts of each token, in the order of their numbers: uint8 [T, L, k], 255 in the dense layer."""
    out = np.full((len(ids), LAYERS, K), 255, dtype=np.uint8)
    hooks = []
    for name, module in model.named_modules():
        if any(parameter.ndim == 3 for parameter in module.parameters(recurse=False)):
            layer = int(name.split("layers.")[1].split(".")[0])

            def note(_: Any, args: Any, layer: int = layer) -> None:
                out[:, layer] = args[1].sort(-1).values.numpy()

            hooks.append(module.register_forward_pre_hook(note))
    model(torch.tensor([list(ids)]))
    for hook in hooks:
        hook.remove()
    return out
