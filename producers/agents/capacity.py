"""Places in the engine: how many samples agents may have in it at once. Who waits for one is served in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class EngineCapacity:
    """A number of places. An agent that runs a tool holds none, so slow tools leave the engine to others."""

    def __init__(self, limit: int) -> None:
        self._free = self._limit = limit
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def take(self, samples: int) -> AsyncIterator[None]:
        """Hold places for so many samples, of more than there are all."""
        count = min(samples, self._limit)
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, ready))
        self._serve()
        try:
            await ready
            yield
        finally:
            if ready.done() and not ready.cancelled():
                self._free += count
            self._serve()

    def _serve(self) -> None:
        while self._waiting:
            count, ready = self._waiting[0]
            if ready.cancelled():
                self._waiting.popleft()
            elif count <= self._free:
                self._waiting.popleft()
                self._free -= count
                ready.set_result(None)
            else:
                return
