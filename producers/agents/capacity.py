"""The engine's capacity for agents: how many samples they may have in it at once. Waiting calls are served in order."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class EngineCapacity:
    """Capacity for a number of samples. An agent that runs a tool holds none, so slow tools do not block others."""

    def __init__(self, limit: int) -> None:
        self._free = self._limit = limit
        self._first = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def take(self, samples: int) -> AsyncIterator[None]:
        """Hold capacity for so many samples in the block; for more than the limit, all of it."""
        count = min(samples, self._limit)
        async with self._first:
            while self._free < count:
                self._freed.clear()
                await self._freed.wait()
            self._free -= count
        try:
            yield
        finally:
            self._free += count
            self._freed.set()
