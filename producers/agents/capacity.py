"""The engine's capacity for agents: how many samples they may have in it at once. Waiting calls are served in order."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class EngineCapacity:
    """Capacity for a number of samples. An agent that runs a tool holds none, so slow tools do not block others."""

    def __init__(self, limit: int) -> None:
        self._free = self._limit = limit
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def take(self, samples: int) -> AsyncIterator[None]:
        """Hold capacity for so many samples in the block; for more than the limit, all of it."""
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
