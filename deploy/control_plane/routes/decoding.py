"""Sampled tokens as text, and MessagePack values as JSON values."""

import base64
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

BROKEN = "\ufffd"
"""A decoder's output for half a character."""
JOINED = 8
"""Most tokens that are decoded together for a whole character, which has up to four bytes."""
DEEPEST = 64

Decode = Callable[[Sequence[int]], str]


def pieces(decode: Decode, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds; of a character of several tokens, the last has it, the others are empty.

    A token is decoded beside the one before it: alone, some tokenizers would lose the space between words. What is no
    character with the JOINED tokens from it on never becomes one.
    """
    texts = [""] * len(ids)
    start = read = 0
    for last in range(1, len(ids) + 1):
        end, now = last, decode(ids[start:last])
        if now.endswith(BROKEN) and last < len(ids):
            if last - read < JOINED:
                continue
            end, now = read + 1, decode(ids[start : read + 1])
        texts[end - 1] = now[len(decode(ids[start:read])) :]
        start, read = read, end
    return texts


def load_decoder(model_path: str) -> Decode | None:
    """Return the decoder of a model folder; None without tokenizer.json or the ``tokenizers`` package."""
    file = Path(model_path) / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    tokenizer: Any = Tokenizer.from_file(str(file))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def plain(value: Any, depth: int = 0) -> Any:
    """Return what MessagePack can hold as JSON can: bytes in base64, no NaN, keys as text, at most DEEPEST levels."""
    if depth > DEEPEST:
        return "..."
    if isinstance(value, dict):
        return {str(key): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)
