"""The bare client of ``bench generator``."""

from __future__ import annotations

import asyncio

from benchmarks.services.generator import count_tokens


async def test_tokens_that_come_side_by_side_are_all_counted() -> None:
    async def ask(index: int, name: str) -> int:
        await asyncio.sleep(0)
        return index

    requests = [(index, f"bare-{index}") for index in range(100)]
    assert await count_tokens(ask, requests, 8) == sum(range(100))
