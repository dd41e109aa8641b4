"""An untrained Qwen2 of 0.7 million parameters with a token for each character, and what its warm start shows."""

from __future__ import annotations

import random
from pathlib import Path

from deploy.offline.tiny_model import byte_tokenizer, write_tiny_model
from tidemill import ChatMessage, Example

CHAT_TEMPLATE = """
{%- for message in messages -%}
{{- message.content -}}
{%- if message.role == 'assistant' -%}<|end|>{%- else -%}={%- endif -%}
{%- endfor -%}
""".strip()


class Beginnings:
    """Sums of two digits, of which ``wrong`` have any number for an answer."""

    def __init__(self, wrong: float = 0.0) -> None:
        self.wrong = wrong

    def __len__(self) -> int:
        return 10000

    def __getitem__(self, index: int) -> Example:
        chance = random.Random(f"sums {index}")
        a, b = chance.randint(0, 9), chance.randint(0, 9)
        answer = chance.randint(0, 18) if chance.random() < self.wrong else a + b
        return Example(messages=[ChatMessage("user", f"{a}+{b}")], data={"answer": str(answer)})


def build(folder: Path, seed: int) -> None:
    """Write config.json, model.safetensors and the tokenizer to ``folder``; the same seed gives the same weights."""
    tokenizer = byte_tokenizer(
        ["<pad>", "<|end|>"],
        "0123456789+=",
        pad_token="<pad>",
        eos_token="<|end|>",
        model_max_length=32,
        chat_template=CHAT_TEMPLATE,
    )
    # A wide start and untied embeddings, as in the arithmetic example.
    write_tiny_model(
        folder, tokenizer, seed, hidden=192, intermediate=384, layers=2, heads=6, max_length=32, initializer_range=0.06
    )
