"""The reward: what the game paid, and nothing for a game that the policy broke off."""

from __future__ import annotations

from typing import Any


def paid(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], *, reward: float | None, **data: Any
) -> float:
    """0 where an answer was cut at ``max_tokens``: that ends its game, which then pays nothing."""
    return reward or 0.0
