"""Counting down, a task whose correct answers have heavy-tailed lengths: ``37 >`` asks for 36, 35 and so on to 0.

Numbers are single tokens, so that a tiny model learns the task: each token follows from the one before. Lengths are
log-normal with a mean of about 60, at most 512 tokens with the end of sequence, as answers of a reasoning model are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from tokenizers import AddedToken

from deploy.offline.tiny_model import byte_tokenizer, write_tiny_model
from producers.datasets.base import Example

LONGEST = 512
"""Tokens of the longest answer, with the end of sequence."""


class Countdown:
    """``size`` prompts with log-normal starting numbers; the same for each split and seed."""

    def __init__(self, split: Literal["train", "heldout"] = "train", size: int = 20_000, seed: int = 0) -> None:
        rng = np.random.default_rng([seed, split == "heldout"])
        # Median 42 and sigma 0.85: mean 60.
        lengths = np.rint(rng.lognormal(np.log(42), 0.85, size)).astype(int)
        self._starts = np.clip(lengths, 2, LONGEST - 1)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Example:
        start = int(self._starts[index])
        return Example(text=f"{start} >", data={"answer": "".join(f"{number} " for number in range(start - 1, -1, -1))})


def build(folder: Path, seed: int) -> None:
    """Write an untrained Qwen2 of 2 layers and a tokenizer in which a number and the space after it are one token."""
    tokenizer = byte_tokenizer(
        ["<pad>", "<eos>"], ">", pad_token="<pad>", eos_token="<eos>", model_max_length=LONGEST + 4
    )
    tokenizer.add_tokens([AddedToken(f"{number} ", normalized=False) for number in range(LONGEST)])
    write_tiny_model(
        folder,
        tokenizer,
        seed,
        hidden=128,
        intermediate=256,
        layers=2,
        heads=4,
        max_length=LONGEST + 4,
        initializer_range=0.06,
    )
