"""An untrained Qwen2 of 0.9 million parameters whose chat template has tools, for `warm_start.model: model.py:build`.

What the frameworks say each time is one token each, so that an episode has some 60 tokens, of smolagents some 120.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken

from deploy.offline.tiny_model import byte_tokenizer, write_tiny_model

SPECIALS = ["<pad>", "<|end|>", "<|tools|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
PIECES = [
    *("<tool_call>", "</tool_call>", '{"name": "', '", "arguments": {"', "multiply", "final_answer"),
    *('a": ', ', "b": ', "}}", 'answer": "', '"}}', "Use the tool."),
    # smolagents writes its history as text, and calls in it as Python shows them.
    *("New task:\n", "Calling tools:\n", "Observation:\n", "[{'id': '", "', 'type': 'function', 'function': "),
    *("{'name': '", "', 'arguments': {'", "a': ", ", 'b': ", "}}}]"),
]
# Of the tools it names only the names.
CHAT_TEMPLATE = """
{%- if tools -%}
<|tools|>{{ tools | map(attribute='function.name') | join(',') }}<|end|>
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
        SPECIALS, pad_token="<pad>", eos_token="<|end|>", model_max_length=512, chat_template=CHAT_TEMPLATE
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
        max_length=512,
        initializer_range=0.06,
    )
