"""Results of ``episode.once``: what an agent has done in the world, and must not do twice."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from schemas.errors import DataError

MOST_BYTES = 1 << 20
"""Of all notes of one episode: they travel with it wherever it goes."""


async def _stay_here() -> None:
    """There is nowhere else to keep them."""


class Notes(dict[str, str]):
    """Results by name, each as JSON. save: returns when whoever goes on with the episode would find them."""

    def __init__(self, notes: dict[str, str] | None = None, save: Callable[[], Awaitable[None]] = _stay_here) -> None:
        super().__init__(notes or {})
        self._save = save

    async def keep(self, name: str, value: str) -> None:
        """Add a result, and return when it is safe. DataError if the episode has too much of that."""
        size = sum(len(key.encode()) + len(one.encode()) for key, one in {**self, name: value}.items())
        if size > MOST_BYTES:
            raise DataError(
                f"the results of once of one episode would have {size} bytes as JSON, the most is {MOST_BYTES}"
            )
        self[name] = value
        await self._save()
