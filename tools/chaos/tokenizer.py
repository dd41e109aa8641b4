"""The tokenizers of the suite's two models, without transformers: a token for each byte, and a few special ones."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from schemas.messages import Task

TEXT = ("<pad>", "<bos>", "<eos>")
"""Special tokens of tests/support/models/tiny_model.py, by id; the third one ends a turn."""
VISION = (
    *("<pad>", "<bos>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<|im_start|>"),
)
"""Special tokens of deploy/offline/tiny_vision_model.py, by id."""
PLACE = VISION.index("<|image_pad|>")
"""The token that stands for images."""
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


class ByteTokenizer:
    """The tokenizer of a model's folder. No script samples the token that closes a turn."""

    chat_template = "messages"
    stop_ids = frozenset({2})

    def __init__(self, path: str, trust_remote_code: bool = False) -> None:
        del trust_remote_code
        self._reads_images = (Path(path) / "preprocessor_config.json").is_file()
        self._special = VISION if self._reads_images else TEXT
        self._marks = re.compile(f"({'|'.join(map(re.escape, self._special))})")
        self.special_ids = frozenset(range(len(self._special)))
        self.longest_token = max(map(len, self._special))

    def prompt_ids(self, task: Task) -> list[int]:
        if task.messages is None:
            return self.encode(task.text or "")
        return self.encode(self.chat_text([{"role": one.role, "content": one.plain} for one in task.messages]))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self._marks.split(text):
            special = part in self._special
            ids += [self._special.index(part)] if special else [byte + len(self._special) for byte in part.encode()]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        first = len(self._special)
        return bytes(token - first for token in ids if first <= token < first + 256).decode(errors="replace")

    def decode_all(self, ids: Sequence[int]) -> str:
        parts = itertools.groupby(ids, lambda token: token if token in self.special_ids else -1)
        return "".join(
            self.decode(list(part)) if token < 0 else self._special[token] * len(list(part)) for token, part in parts
        )

    def token_text(self, token: int) -> str:
        return self.decode([token])

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: object = None,
        *,
        generation_prompt: bool = True,
        args: object = None,
    ) -> str:
        begin, end = ("<|im_start|>", "<|im_end|>\n") if self._reads_images else ("<bos>", "<eos>")
        after = "\n" if self._reads_images else ":"
        text = "".join(f"{begin}{one['role']}{after}{_content(one)}{end}" for one in messages)
        return text + f"{begin}assistant{after}" if generation_prompt else text


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(IMAGE if part["type"] == "image" else part["text"] for part in content)
