"""Small random models of families whose tensors have another form or name in memory than in their folder."""

from pathlib import Path
from typing import Any

import torch

from tests.support.models.tiny_model import make_tokenizer

_SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}
_ROUTED = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": _ROUTED
    | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    | {"num_key_value_heads": 2},
    "ernie4_5_moe": {"moe_intermediate_size": 32, "moe_num_experts": 4, "moe_k": 2},
    "glm4_moe": _ROUTED | {"head_dim": 32},
    "gpt_neox": {"num_key_value_heads": 2},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 32, "layer_types": ["full_attention"] * 2},
    "granitemoe": {"num_local_experts": 4},
    "jamba": {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32},
    "mixtral": {"num_local_experts": 4},
    "nemotron_h": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 4},
    "qwen3_moe": _EXPERTS,
    "qwen3_next": _EXPERTS
    | {"shared_expert_intermediate_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
    | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
"""Settings of each family's configuration, beside sizes that all have."""
_LATENT = _ROUTED | FAMILIES["deepseek_v3"]
_INDEXED = _LATENT | {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}
_LINEAR = {f"linear_{part}": size for part, size in (("num_key_heads", 2), ("num_value_heads", 2))} | {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_ANY = _ROUTED | _EXPERTS | {"num_local_experts": 4}
OTHERS: dict[str, dict[str, Any]] = {
    "afmoe": _ANY,
    "aria_text": _ANY,
    "axk1": _LATENT,
    "axk2": _LATENT,
    "cohere2_moe": _ANY,
    "deepseek_v2": _LATENT,
    "deepseek_v32": _INDEXED,
    "deepseek_v4": _ANY,
    "exaone_moe": _ANY,
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0},
    "gemma3n_text": {"head_dim": 32, "layer_types": ["sliding_attention", "full_attention"]}
    | {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 260, "hidden_size_per_layer_input": 8}
    | {"laurel_rank": 8},
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _INDEXED,
    "granitemoehybrid": _ANY,
    "granitemoeshared": _ANY,
    "hrm_text": {"head_dim": 32},
    "hunyuan_v1_moe": _ANY,
    "hy_v3": _ANY,
    "kimi_linear": _LATENT | {"pad_token_id": 0, "num_experts": 4, "head_dim": 32},
    "laguna": _ANY,
    "lfm2_moe": {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "num_dense_layers": 1}
    | {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": _LATENT
    | {"moe_topk": 2, "zero_expert_num": 1, "expert_ffn_hidden_size": 32, "ffn_hidden_size": 64}
    | {"num_layers": 2, "head_dim": 8},
    "mellum": _ANY,
    "mimo_v2_flash": _ANY,
    "minimax": _ANY,
    "olmo_hybrid": {"pad_token_id": 0},
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3_5_moe_text": _EXPERTS | {"shared_expert_intermediate_size": 16} | _LINEAR,
    "qwen3_5_text": {"head_dim": 32} | _LINEAR,
    "solar_open": _ANY,
}
"""The others that transformers converts when it reads a folder, and that are small enough."""


def make_family(folder: Path, family: str, seed: int = 0) -> Path:
    """Write a random model of this family, with a byte tokenizer, in float32; returns the folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    own = (FAMILIES | OTHERS)[family]
    config = AutoConfig.for_model(family, **_SIZES | {"eos_token_id": tokenizer.eos_token_id} | own)
    model = AutoModelForCausalLM.from_config(config)
    for buffer in model.buffers():
        if not buffer.is_floating_point():
            buffer.random_(2)  # a table of experts, which a configuration alone leaves at 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
