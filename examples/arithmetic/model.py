"""An untrained tiny Qwen2 with a character tokenizer, for `warm_start.model: model.py:build`.

Small enough to learn addition on two CPU cores, and an ordinary model folder to Hugging Face and vLLM.
"""

from __future__ import annotations

from pathlib import Path

from deploy.offline.tiny_model import byte_tokenizer, write_tiny_model


def build(folder: Path, seed: int, hidden: int = 192, initializer_range: float = 0.06) -> None:
    """Write config.json, model.safetensors and the tokenizer to ``folder``; the same seed gives the same weights.

    initializer_range: three times the usual scale, with which a model this narrow starts to learn in a third of the
    steps. Embeddings are not tied: vLLM on the CPU keeps a stale packed head when these are updated in flight.
    """
    tokenizer = byte_tokenizer(
        ["<pad>", "<eos>"], "0123456789+=", pad_token="<pad>", eos_token="<eos>", model_max_length=64
    )
    write_tiny_model(
        folder,
        tokenizer,
        seed,
        hidden=hidden,
        intermediate=2 * hidden,
        layers=2,
        heads=hidden // 32,
        max_length=64,
        initializer_range=initializer_range,
    )


def build_small(folder: Path, seed: int) -> None:
    """The same with half the width, for examples/minimal_loop.py and benchmarks/learning/staleness.yaml."""
    build(folder, seed, hidden=96, initializer_range=0.08)
