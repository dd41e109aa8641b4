"""An untrained Qwen2 of 0.9 million parameters that can be given tools, for `warm_start.model: model.py:build`.

It can't multiply, and never will: what it can learn is to ask a calculator. An ordinary model folder to Hugging Face
and vLLM, with a chat template of its own.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken

from deploy.offline.tiny_model import byte_tokenizer, write_tiny_model

SPECIALS = ["<pad>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
# Ordinary text that is one token each, so that a tool call has 13 tokens instead of 70.
PIECES = ["<tool_call>", "</tool_call>", '{"name": "', "calculator", '", "arguments": {"', "expression", '": "', '"}}']
# One token opens a turn, one closes it. Of the tools it names only the names: as a system message, the first turn.
CHAT_TEMPLATE = """
{%- if tools -%}
<|system|>{{ tools | map(attribute='function.name') | join(',') }}<|end|>
{%- endif -%}
{%- for message in messages -%}
<|{{ message.role }}|>{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
{%- set arguments = call.function.arguments -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ arguments if arguments is string
    else arguments | tojson }}}</tool_call>
{%- endfor -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>
{%- endif -%}
""".strip()


def build(folder: Path, seed: int) -> None:
    """Write config.json, model.safetensors and the tokenizer to ``folder``; the same seed gives the same weights."""
    tokenizer = byte_tokenizer(
        SPECIALS, pad_token="<pad>", eos_token="<|end|>", model_max_length=128, chat_template=CHAT_TEMPLATE
    )
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in PIECES])
    # A wide start and untied embeddings, as in the arithmetic example.
    write_tiny_model(
        folder,
        tokenizer,
        seed,
        hidden=192,
        intermediate=384,
        layers=2,
        heads=6,
        max_length=128,
        initializer_range=0.06,
    )
