"""Small random vision models: a Qwen2.5-VL or Qwen3-VL of any size with a byte-level tokenizer, as a folder.

Examples and tests make their models here, as they make those of text by tiny_model.py.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from deploy.offline.tiny_model import byte_tokenizer

Family = Literal["qwen2_5_vl", "qwen3_vl"]
SPECIALS = (
    "<pad>",
    "<bos>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|im_start|>",
)
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Qwen's chat template, as far as texts and images go."""
HIDDEN, LAYERS, HEADS = 64, 2, 2


def write_tiny_vision_model(
    folder: Path,
    family: Family = "qwen2_5_vl",
    seed: int = 0,
    *,
    max_length: int = 1024,
    spread: float = 0.1,
    most_pixels: int = 112 * 112,
    characters: str | None = None,
    tokens: Sequence[str] = (),
) -> int:
    """Write a random model with its tokenizer to ``folder``; returns the number of parameters.

    spread: standard deviation of the weights. characters: of the tokenizer, all bytes where None.
    tokens: more of them, which are no text, such as actions.
    """
    tokenizer = byte_tokenizer(
        SPECIALS, characters, pad_token="<pad>", bos_token="<bos>", eos_token="<|im_end|>", chat_template=TEMPLATE
    )
    tokenizer.add_tokens(list(tokens))
    ids = {name: number for number, name in enumerate(SPECIALS)}
    patch = 14 if family == "qwen2_5_vl" else 16
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _model(family, len(tokenizer), ids, max_length, spread, patch)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor" if family == "qwen2_5_vl" else "Qwen3VLProcessor",
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": (2 * patch) ** 2, "longest_edge": most_pixels},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    return int(sum(parameter.numel() for parameter in model.parameters()))


def _model(
    family: Family, vocabulary: int, ids: dict[str, int], max_length: int, spread: float, patch: int
) -> PreTrainedModel:
    half = HIDDEN // HEADS // 2
    settings: Any
    kind: Any
    both = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "initializer_range": spread}
    text: dict[str, Any] = both | {
        "vocab_size": vocabulary,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": max_length,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [half - 2 * (half * 3 // 8), half * 3 // 8, half * 3 // 8],
        },
        "bos_token_id": ids["<bos>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<pad>"],
        "tie_word_embeddings": False,
    }
    vision: dict[str, Any] = both | {
        "depth": 2,
        "num_heads": HEADS,
        "out_hidden_size": HIDDEN,
        "patch_size": patch,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    tokens: dict[str, Any] = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": False,
    }
    if family == "qwen2_5_vl":
        vision |= {"window_size": 112, "fullatt_block_indexes": [1]}
        settings, kind = Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    else:
        vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
        # As in the models of the hub: vLLM asks for it, transformers always does so.
        text["rope_parameters"]["mrope_interleaved"] = True
        settings, kind = Qwen3VLConfig, Qwen3VLForConditionalGeneration
    model: PreTrainedModel = kind(settings(text_config=text, vision_config=vision, **tokens)).float()
    return model
