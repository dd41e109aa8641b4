"""Random adapters of the tiny models as files, and what they do to a model, written from LoRA's formula."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

RANK, ALPHA = 4, 8.0
TARGETS = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def write_adapter(model: Path, file: Path, seed: int, rank: int = RANK, targets: Sequence[str] = TARGETS) -> Path:
    """An adapter of the linear layers with these last names that changes every log-probability a lot; float32."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, layer in AutoModelForCausalLM.from_pretrained(model).named_modules():
        if isinstance(layer, nn.Linear) and name.rpartition(".")[2] in targets:
            up, down = torch.Size([layer.out_features, rank]), torch.Size([rank, layer.in_features])
            tensors[f"base_model.model.{name}.lora_A.weight"] = 0.2 * torch.randn(down, generator=generator)
            tensors[f"base_model.model.{name}.lora_B.weight"] = 0.2 * torch.randn(up, generator=generator)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, file)
    return file


@torch.no_grad()
def merge_adapter(model: Path, file: Path | None, scale: float = ALPHA / RANK) -> PreTrainedModel:
    """The model with W + scale * B A in float32; as it is without a file."""
    causal_lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapter = load_file(file) if file else {}
    for name, down in adapter.items():
        if name.endswith(".lora_A.weight"):
            layer = causal_lm.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            layer.weight += scale * adapter[name.replace(".lora_A.", ".lora_B.")].float() @ down.float()
    return causal_lm


@torch.no_grad()
def compute_logprobs(model: PreTrainedModel, tokens: Sequence[int]) -> np.ndarray:
    """Log-probability of each token after the first, float32 [T-1]."""
    ids = torch.tensor([list(tokens)])
    distribution = torch.log_softmax(model(ids).logits[0, :-1].float(), dim=-1)
    return distribution.gather(1, ids[0, 1:, None])[:, 0].numpy()
