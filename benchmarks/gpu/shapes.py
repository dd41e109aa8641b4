"""Random models with the shapes of popular models, and a tiny one: ``python -m benchmarks.gpu.shapes FOLDER NAME``.

A random model has the speed, the memory and the rounding of a trained one; it learns nothing. So nothing is downloaded.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from deploy.offline.tiny_model import byte_tokenizer
from examples.gsm8k.make_tiny_model import CHAT_TEMPLATE, SPECIALS

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "layers": 2, "heads": 4, "kv": 2},
    "0.5B": {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "layers": 24, "heads": 14, "kv": 2},
    "1.5B": {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "layers": 28, "heads": 12, "kv": 2},
    "7B": {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "layers": 28, "heads": 28, "kv": 4},
}
"""Those of Qwen2.5, by name."""


def make_model(folder: Path, name: str, seed: int = 0) -> Path:
    """Write a random bfloat16 Qwen2 of this shape and a byte tokenizer to ``folder``, once; returns the folder."""
    if (folder / "config.json").is_file():
        return folder
    shape = dict(SHAPES[name])
    layers, heads, kv = (shape.pop(part) for part in ("layers", "heads", "kv"))
    tokenizer = byte_tokenizer(
        SPECIALS, pad_token="<|endoftext|>", eos_token="<|im_end|>", model_max_length=32768, chat_template=CHAT_TEMPLATE
    )
    config = Qwen2Config(  # type: ignore[call-arg]  # rope_theta is among its further settings
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        max_position_embeddings=32768,
        rope_theta=1e6,
        tie_word_embeddings=name != "7B",
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **shape,
    )
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    make_model(Path(sys.argv[1]), sys.argv[2])
