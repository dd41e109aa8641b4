"""Which requests an update of the weights has to wait for, and which have to wait for it.

A request passes the gate once and is inside until it is done. While the gate is shut new
ones wait before it: none of them may be prepared for weights that are about to go.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Open at first; shut while anybody holds it shut. All in one event loop."""

    def __init__(self) -> None:
        self._inside = 0
        self._shut = 0
        self._turned_away = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[bool]:
        """Wait until the gate is open; False when ``turn_away`` came first, and then nothing may be asked for."""
        if self._shut and not await self._wait():
            yield False
            return
        self._inside += 1
        try:
            yield True
        finally:
            self._inside -= 1
            if self._shut:
                await self._notify()

    async def _wait(self) -> bool:
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

    async def empty(self) -> None:
        """Wait until nobody is inside; only for who holds the gate shut, or it may never come."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._inside)

    async def turn_away(self) -> None:
        """Send all away who wait before the gate now."""
        self._turned_away += 1
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
