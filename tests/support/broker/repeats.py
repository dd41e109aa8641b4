"""A connection that runs every script twice, as after a lost answer, and compares answers and the run's data."""

from collections.abc import Sequence
from typing import Any

import redis

from broker.connection.connection import Connection
from broker.connection.keys import GENERATORS, REWARD, TRAINER

WAKE_UPS = {"changes", "orders", "roll_changes", "roll_answers"}
"""Streams that wake services; one wake-up more is harmless."""
GROUPS = (GENERATORS, REWARD, TRAINER)


class RepeatingConnection(Connection):
    """Returns the first answers, and of a takeover, which makes a term, the last.

    differing: scripts whose answer differed, with a pair. changed: scripts that changed data again, with its keys.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.called: set[str] = set()
        self.differing: dict[str, tuple[Any, Any]] = {}
        self.changed: dict[str, list[str]] = {}

    def _evaluate(self, client: redis.Redis, name: str, args: tuple[Any, ...]) -> Any:
        return self._twice(client, name, lambda: Connection._evaluate(self, client, name, args))

    def _evaluate_all(self, client: redis.Redis, name: str, calls: Sequence[Sequence[Any]]) -> list[Any]:
        one = Connection._evaluate_all
        return [self._twice(client, name, lambda call=call: one(self, client, name, [call])[0]) for call in calls]

    def _evaluate_with_fields(
        self, client: redis.Redis, name: str, key: str, calls: Sequence[tuple[Sequence[Any], Sequence[Any]]]
    ) -> list[Any]:
        one = Connection._evaluate_with_fields
        return [self._twice(client, name, lambda call=call: one(self, client, name, key, [call])[0]) for call in calls]

    def _twice(self, client: redis.Redis, name: str, call: Any) -> Any:
        self.called.add(name)
        first, before = call(), self._read_data(client)
        second, after = call(), self._read_data(client)
        if first != second:
            self.differing.setdefault(name, (first, second))
        if found := [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]:
            self.changed.setdefault(name, found)
        return second if name == "take_over" else first

    def _read_data(self, client: redis.Redis) -> dict[str, Any]:
        """Read the content of the run's keys by name, without what only wakes services, and without moments."""
        names = {name: key for name, key in vars(self.keys).items() if name not in WAKE_UPS | {"base"}}
        pipe = client.pipeline(transaction=False)
        for key in names.values():
            pipe.type(key)
        kinds = [kind.decode() for kind in pipe.execute()]
        for key, kind in zip(names.values(), kinds, strict=True):
            if kind == "stream":
                pipe.xrange(key)
                pipe.xinfo_groups(key)
                for group in GROUPS:
                    pipe.xpending_range(key, group, "-", "+", 1000)
            else:
                {"hash": pipe.hgetall, "string": pipe.get, "list": lambda key: pipe.lrange(key, 0, -1)}.get(
                    kind, lambda key: pipe.zrange(key, 0, -1)
                )(key)
        found = iter(pipe.execute(raise_on_error=False))
        data: dict[str, Any] = {}
        for name, kind in zip(names, kinds, strict=True):
            if kind == "stream":
                entries, groups = next(found), next(found)
                pending = [next(found) for _ in GROUPS]
                held = [
                    (one["message_id"], one["consumer"], one["times_delivered"])
                    for of_group in pending
                    if isinstance(of_group, list)
                    for one in of_group
                ]
                data[name] = entries, [group["last-delivered-id"] for group in groups], held
            else:
                data[name] = None if kind == "none" else next(found)
                if kind == "none":
                    next(found)
        (data.get("roll") or {}).pop(b"ends", None)
        for peer in [field for field in (data.get("peers") or {}) if field != b"key"]:
            data["peers"][peer] = data["peers"][peer].partition(b" ")[2]
        for field in [field for field in (data.get("evals") or {}) if field.endswith(b":time")]:
            del data["evals"][field]
        return data
