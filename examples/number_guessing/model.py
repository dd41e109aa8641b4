"""An untrained Qwen2 of 0.8 million parameters that has a token for each number."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken

from deploy.offline.tiny_model import byte_tokenizer, write_tiny_model

CHAT_TEMPLATE = """
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}<|guess|>{%- endif -%}
{{- message.content -}}
{%- if message.role == 'assistant' -%}<|end|>{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|guess|>{%- endif -%}
""".strip()


def build(folder: Path, seed: int) -> None:
    """Write config.json, model.safetensors and the tokenizer to ``folder``; the same seed gives the same weights."""
    tokenizer = byte_tokenizer(
        ["<pad>", "<|end|>", "<|guess|>"],
        "0123456789?<>",
        pad_token="<pad>",
        eos_token="<|end|>",
        model_max_length=64,
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.add_tokens([AddedToken(str(number), special=False, normalized=False) for number in range(10, 64)])
    # A wide start and untied embeddings, as in the arithmetic example.
    write_tiny_model(
        folder, tokenizer, seed, hidden=192, intermediate=384, layers=2, heads=6, max_length=64, initializer_range=0.06
    )
