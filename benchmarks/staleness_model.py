"""The untrained model of benchmarks/staleness.yaml: that of examples/arithmetic with half its width."""

from __future__ import annotations

from pathlib import Path

from schemas.plugins import load

EXAMPLE = Path(__file__).parents[1] / "examples" / "arithmetic"


def build(folder: Path, seed: int) -> None:
    """Write config.json, model.safetensors and the tokenizer to ``folder``; the same seed gives the same weights."""
    load("model.py:build", "model", EXAMPLE)(folder, seed, hidden=96, initializer_range=0.08)
