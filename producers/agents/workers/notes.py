"""Results of ``episode.once``: side effects of an agent that must not happen twice."""

from collections.abc import Awaitable, Callable

from schemas.errors import DataError

MOST_BYTES = 1 << 20
"""The most bytes of all notes of one episode, which are handed over with it."""


async def _stay_here() -> None:
    """Store nothing: the notes stay in this process."""


class Notes(dict[str, str]):
    """Results by name, each as JSON. save: returns when a generator that resumes the episode would find them."""

    def __init__(self, notes: dict[str, str] | None = None, save: Callable[[], Awaitable[object]] = _stay_here) -> None:
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
        await self._save()
