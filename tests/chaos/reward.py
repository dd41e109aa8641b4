"""The suite's reward: any number in [0, 1), always the same one for the same completion."""

from __future__ import annotations

import zlib
from typing import Any

from consumers.reward.rewards.terms import reward


@reward(inline=True)
def checksum(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    """The completion's CRC-32 as a fraction of 2**32."""
    return zlib.crc32(repr(completion_ids).encode()) / 2**32
