"""An untrained Qwen2 of 0.8 million parameters that reads each message of TextArena's GuessTheNumber as one token."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken

from deploy.offline.tiny_model import byte_tokenizer, write_tiny_model

# The game says the same sentences in every game: the model distinguishes which of them it was.
CHAT_TEMPLATE = """
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}<|guess|>{{- message.content -}}<|end|>
{%- elif 'number is higher' in message.content -%}>
{%- elif 'number is lower' in message.content -%}<
{%- elif 'invalid move' in message.content -%}!
{%- else -%}?
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|guess|>{%- endif -%}
""".strip()


def build(folder: Path, seed: int) -> None:
    """Write config.json, model.safetensors and the tokenizer to ``folder``; the same seed gives the same weights."""
    tokenizer = byte_tokenizer(
        ["<pad>", "<|end|>", "<|guess|>"],
        "?><!",
        pad_token="<pad>",
        eos_token="<|end|>",
        model_max_length=48,
        chat_template=CHAT_TEMPLATE,
    )
    # A guess is one token, with the brackets that the game asks for.
    tokenizer.add_tokens([AddedToken(f"[{number}]", special=False, normalized=False) for number in range(1, 21)])
    # A wide start and untied embeddings, as in the arithmetic example.
    write_tiny_model(
        folder, tokenizer, seed, hidden=192, intermediate=384, layers=2, heads=6, max_length=48, initializer_range=0.06
    )
