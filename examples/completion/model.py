"""An untrained Qwen2 of 0.7 million parameters that reads a line of code letter by letter."""

from __future__ import annotations

from pathlib import Path

from deploy.offline.tiny_model import byte_tokenizer, write_tiny_model


def build(folder: Path, seed: int) -> None:
    """Write config.json, model.safetensors and the tokenizer to ``folder``; the same seed gives the same weights."""
    tokenizer = byte_tokenizer(
        ["<pad>", "<eos>"], "abcdexyz([{)]}", pad_token="<pad>", eos_token="<eos>", model_max_length=32
    )
    # A wide start and untied embeddings, as in the arithmetic example.
    write_tiny_model(
        folder, tokenizer, seed, hidden=192, intermediate=384, layers=2, heads=6, max_length=32, initializer_range=0.06
    )
