"""Results of ``episode.once``: side effects of an agent that must not happen twice."""

from collections.abc import Awaitable, Callable

from schemas.errors import DataError

_Save = Callable[[], Awaitable[object]]
MOST_BYTES = 1 << 20
"""The most bytes of all notes of one episode, which are handed over with it."""


class Notes(dict[str, str]):
    """Results by name, each as JSON. save: returns when a generator that resumes the episode would find them."""

    def __init__(self, notes: dict[str, str] | None = None, save: _Save | None = None) -> None:
        super().__init__(notes or {})
        self._save = save

    async def keep(self, name: str, value: str) -> None:
        """Add a result, and return when it is stored. DataError if the episode's notes get too large."""
        size = sum(len(key.encode()) + len(one.encode()) for key, one in {**self, name: value}.items())
        if size > MOST_BYTES:
            raise DataError(
                f"the results of once of one episode would have {size} bytes as JSON, the most is {MOST_BYTES}"
            )
        self[name] = value
        if self._save is not None:
            await self._save()
