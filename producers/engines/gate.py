"""New requests wait before the gate while it is shut: none may be prepared for weights that are about to go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Open at first; shut while anybody holds it shut. All in one event loop."""

    def __init__(self) -> None:
        self._shut = 0
        self._turned_away = 0
        self._changed = asyncio.Condition()

    async def enter(self) -> bool:
        """Wait until the gate is open; False when ``turn_away`` came first."""
        if not self._shut:
            return True
        async with self._changed:
            then = self._turned_away
            await self._changed.wait_for(lambda: not self._shut or self._turned_away != then)
            return self._turned_away == then

    @asynccontextmanager
    async def shut(self) -> AsyncIterator[None]:
        """Nobody gets in meanwhile."""
        self._shut += 1
        try:
            yield
        finally:
            self._shut -= 1
            await self._notify()

    async def turn_away(self) -> None:
        """Send all away who wait before the gate now."""
        self._turned_away += 1
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
