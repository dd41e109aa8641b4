"""The text of each token of a trajectory, so that a page can colour them; needs the model's tokenizer.json at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import structlog

BROKEN = "\ufffd"
"""What a decoder gives for half a character."""

log = structlog.get_logger()
Decode = Callable[[Sequence[int]], str]


def pieces(decode: Decode, ids: Sequence[int]) -> list[str]:
    """Text that each token adds. A character made of several tokens is in the last of them, the others are empty.

    A token is decoded beside the one before it: alone, some tokenizers would lose the space between words.
    """
    texts: list[str] = []
    start = read = 0
    for end in range(1, len(ids) + 1):
        before, now = decode(ids[start:read]), decode(ids[start:end])
        if now.endswith(BROKEN) and end < len(ids):
            texts.append("")
            continue
        texts.append(now[len(before) :])
        start, read = read, end
    return texts


def load_decoder(model_path: str) -> Decode | None:
    """Decoder of the model's folder; None where there is no tokenizer.json or no ``tokenizers`` package."""
    file = Path(model_path) / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    tokenizer: Any = Tokenizer.from_file(str(file))

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    return decode
