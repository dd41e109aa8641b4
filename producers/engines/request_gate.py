"""The gate before an engine: requests wait while its weights change, so that none is prepared for those about to go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class RequestGate:
    """Lets requests in unless somebody holds it closed. All in one event loop."""

    def __init__(self) -> None:
        self._closed = 0
        self._rejections = 0
        self._changed = asyncio.Condition()

    @property
    def rejections(self) -> int:
        """How often ``reject_waiting`` was called."""
        return self._rejections

    async def wait_open(self, rejections: int | None = None) -> bool:
        """Wait until the gate is open; False when ``reject_waiting`` came first.

        rejections: how many there had been when the request came, by default none is looked for before this call.
        """
        then = self._rejections if rejections is None else rejections
        if self._rejections != then or not self._closed:
            return self._rejections == then
        async with self._changed:
            await self._changed.wait_for(lambda: not self._closed or self._rejections != then)
            return self._rejections == then

    @asynccontextmanager
    async def held_closed(self) -> AsyncIterator[None]:
        """Let no request in for as long as the block takes."""
        self._closed += 1
        try:
            yield
        finally:
            self._closed -= 1
            await self._notify()

    async def reject_waiting(self) -> None:
        """Refuse all requests that wait before the gate now."""
        self._rejections += 1
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
