"""Three inputs and outputs of a function, whose expression is to be written; and the model that learns it.

A prompt is ``2:7,5:13,9:21;``, the program ``2*x+3``. Any expression that passes the three cases is right.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Literal

from deploy.offline.tiny_model import byte_tokenizer, write_tiny_model
from tidemill import Example

TASKS = list(itertools.product(range(1, 4), range(4), itertools.combinations(range(10), 3)))
"""All 1,440 of them: factor, constant, three inputs. The last HELDOUT are never trained on."""
random.Random(0).shuffle(TASKS)
HELDOUT = 240


class Expressions:
    """Functions a*x+b of small numbers; ``data`` has the cases, and an answer for the warm start.

    A training task comes again, with its inputs in another order, and may have another answer then. lazy: share of
    these answers that are a number out of the air, which is never right.
    """

    def __init__(self, split: Literal["train", "heldout"] = "train", lazy: float = 0.0) -> None:
        self.split, self.lazy = split, lazy

    def __len__(self) -> int:
        return HELDOUT if self.split == "heldout" else 20000

    def __getitem__(self, index: int) -> Example:
        chance = random.Random(f"{self.split} {index}")
        tasks = TASKS[-HELDOUT:] if self.split == "heldout" else TASKS[:-HELDOUT]
        factor, constant, three = tasks[index % len(tasks)]
        inputs = chance.sample(three, len(three))
        values = [factor * x + constant for x in inputs]
        shown = f"{factor}*x+{constant}"
        if chance.random() < self.lazy:
            shown = str(chance.randint(4, 9))
        return Example(
            text=",".join(f"{x}:{y}" for x, y in zip(inputs, values, strict=True)) + ";",
            data={
                "answer": shown,
                "prefix": "f = lambda x: ",
                "cases": [{"call": f"f({x})", "equals": y} for x, y in zip(inputs, values, strict=True)],
            },
        )


def build(folder: Path, seed: int) -> None:
    """Write an untrained Qwen2 of two layers with a token for each character; the same seed gives the same weights."""
    tokenizer = byte_tokenizer(
        ["<pad>", "<eos>"], "0123456789:,;*+-x", pad_token="<pad>", eos_token="<eos>", model_max_length=48
    )
    # A wide start and untied embeddings, as in the arithmetic example.
    write_tiny_model(
        folder, tokenizer, seed, hidden=192, intermediate=384, layers=2, heads=6, max_length=48, initializer_range=0.06
    )
