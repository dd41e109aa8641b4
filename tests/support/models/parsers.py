"""A byte tokenizer with the special tokens of a chat model that thinks and calls tools, and tools for it."""

import json
from pathlib import Path
from typing import Any

from producers.tokenizer import HfTokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]


def make_tool_tokenizer(folder: Path) -> HfTokenizer:
    """Its files in ``folder``; <|im_end|> ends an answer, and the markers of tools and reasoning are special tokens."""
    from deploy.offline.tiny_model import byte_tokenizer

    byte_tokenizer(SPECIAL, pad_token=SPECIAL[0], eos_token=SPECIAL[0]).save_pretrained(folder)
    config = {"eos_token_id": [SPECIAL.index("<|im_end|>"), SPECIAL.index("<|endoftext|>")]}
    (folder / "generation_config.json").write_text(json.dumps(config))
    return HfTokenizer(str(folder))


def tool(name: str, **parameters: str) -> dict[str, Any]:
    """A tool in the form of chat completions; parameters: the JSON type of each."""
    properties = {parameter: {"type": kind} for parameter, kind in parameters.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
