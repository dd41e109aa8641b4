"""The result that an agent returns, and the ``episode`` that it is given to report results earlier."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from .connection import GeneratorConnection, UserCodeError, describe


def number(value: Any, what: str) -> float:
    """Return a finite number; scalars of numpy and torch are numbers, too. UserCodeError names anything else."""
    if isinstance(value, (str, bytes)) or not hasattr(type(value), "__float__"):
        raise UserCodeError(f"{what} must be a number, is {type(value).__name__}")
    converted = float(value)
    if not math.isfinite(converted):
        raise UserCodeError(f"{what} must be finite, is {converted}")
    return converted


def read_outcome(value: Any) -> dict[str, Any]:
    """Read what an agent returned: None, a number, or a mapping of reward, turns, metrics, data."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        return {"reward": number(value, "the result of run, unless it is a dict or None,")}
    unknown = sorted(str(key) for key in value if key not in ("reward", "turns", "metrics", "data"))
    if unknown:
        raise UserCodeError(f"run returned {unknown[0]!r}: a dict may have reward, turns, metrics and data")
    outcome: dict[str, Any] = {}
    if value.get("reward") is not None:
        outcome["reward"] = number(value["reward"], "reward")
    for key in ("turns", "metrics"):
        if value.get(key) is not None:
            outcome[key] = numbers(value[key], key)
    if value.get("data") is not None:
        outcome["data"] = json.loads(json_text(value["data"], "data"))
        if not isinstance(outcome["data"], dict):
            raise UserCodeError(f"data must be a dict, is {type(outcome['data']).__name__}")
    return outcome


def numbers(value: Any, what: str) -> dict[str, float]:
    """Return a mapping of names to finite numbers."""
    if not isinstance(value, dict):
        raise UserCodeError(f"{what} must be a dict of numbers, is {type(value).__name__}")
    return {str(key): number(item, f"{what}[{key!r}]") for key, item in value.items()}


def json_text(value: Any, what: str) -> str:
    """Return a value as JSON. UserCodeError names it as ``what`` if it has no JSON form."""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserCodeError(f"{what} must be JSON: {describe(error)}") from None


class PendingNotes:
    """The notes that the generator is asked to keep: results of side effects."""

    def __init__(self, connection: GeneratorConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[None]] = {}

    def keep(self, episode: int, name: str, value: str) -> Future[None]:
        """Send a note; the future is done when the generator keeps it, with UserCodeError if it can't."""
        number, kept = next(self._numbers), Future[None]()
        self._waiting[number] = kept
        self._connection.send({"op": "note", "episode": episode, "name": name, "value": value, "note": number})
        return kept

    def settle(self, order: dict[str, Any]) -> None:
        """End the wait for a note, with the error that the reply names, if any."""
        kept = self._waiting.pop(order["note"])
        if order["error"]:
            kept.set_exception(UserCodeError(order["error"]))
        else:
            kept.set_result(None)


class EpisodeHandle:
    """The ``episode`` that a plain function is given.

    id: the same in every attempt, so a retry finds what was stored under it. attempt: 0, 1, ... deadline: Unix seconds.
    """

    def __init__(self, connection: GeneratorConnection, store: PendingNotes, order: dict[str, Any]) -> None:
        self.id: str = order["id"]
        self.attempt: int = order["attempt"]
        self.deadline: float = order["deadline"]
        self._number = order["episode"]
        self._notes: dict[str, str] = order["notes"]
        self._connection, self._store = connection, store
        self._locks: dict[str, Any] = {}

    def reward(self, value: Any, completion_id: str | None = None) -> None:
        """Set the reward of the episode, or of one completion of the policy by its id."""
        converted = number(value, "reward")
        self._report({"reward": converted} if completion_id is None else {"turns": {str(completion_id): converted}})

    def metrics(self, **values: Any) -> None:
        """Report numbers about this episode."""
        self._report({"metrics": numbers(values, "metrics")})

    def once(self, name: str, function: Callable[[], Any]) -> Any:
        """Call a function that must not run twice, and return its result, which must be JSON.

        If the episode is restarted because its process or generator was lost, the stored result is returned.
        """
        with self._locks.setdefault(name, threading.Lock()):
            if name not in self._notes:
                value = json_text(function(), f"the result of once({name!r})")
                self._store.keep(self._number, name, value).result()
                self._notes[name] = value
            return json.loads(self._notes[name])

    def _report(self, report: dict[str, Any]) -> None:
        self._connection.send({"op": "report", "episode": self._number, **report})


class AsyncEpisodeHandle(EpisodeHandle):
    """The ``episode`` that an async function is given."""

    async def once(self, name: str, function: Callable[[], Any]) -> Any:
        """Like ``EpisodeHandle.once``, but to be awaited; ``function`` may be async."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            if name not in self._notes:
                result = function()
                result = await result if inspect.isawaitable(result) else result
                value = json_text(result, f"the result of once({name!r})")
                await asyncio.wrap_future(self._store.keep(self._number, name, value))
                self._notes[name] = value
            return json.loads(self._notes[name])
