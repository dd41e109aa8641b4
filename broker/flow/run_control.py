"""Orders of people to a running system: pause, resume, checkpoint, stop, replicas. The broker keeps them.

An order has a number that only grows. A service's heartbeat says which numbers it has acknowledged, so "done" is what
the services say of themselves, and an order outlives restarts of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import redis

from broker.connection.connection import BLOCK_MS, Connection
from schemas.control_api import PauseMode

MODES: tuple[PauseMode, ...] = get_args(PauseMode)


@dataclass(frozen=True)
class ControlState:
    """The orders that are in force now.

    pause: freeze stops every token and step at once, drain admits nothing new. pause_id: number of the last pause or
    resume; checkpoint, stop: numbers of the last such order, 0 for none. by, since: who paused or resumed, and when
    (Unix seconds). replicas: wanted, by role; scaled: number of the last such order, by role. concurrency: samples in
    flight in one generator, None for its own. settings: others that people changed, by name. evaluate: weight version
    that is to be evaluated, -1 for none. asked: how often people asked the policy something. run_id, run_since:
    identity of the run that is ordered about (schemas/run_record.py), empty while it is not known, and when its first
    attempt began (Unix seconds).
    """

    pause: PauseMode = "none"
    pause_id: int = 0
    by: str = ""
    since: float = 0.0
    checkpoint: int = 0
    stop: int = 0
    replicas: Mapping[str, int] = field(default_factory=dict)
    scaled: Mapping[str, int] = field(default_factory=dict)
    concurrency: int | None = None
    run_id: str = ""
    run_since: float = 0.0
    settings: Mapping[str, float] = field(default_factory=dict)
    evaluate: int = -1
    asked: int = 0

    @classmethod
    def parse(cls, fields: Mapping[str, str]) -> ControlState:
        """Parse the hash in the broker."""
        mode = fields.get("pause", "none")
        concurrency = fields.get("concurrency", "")
        return cls(
            pause=next((known for known in MODES if known == mode), "none"),
            pause_id=int(fields.get("pause_id", 0)),
            by=fields.get("by", ""),
            since=float(fields.get("since", 0)),
            checkpoint=int(fields.get("checkpoint", 0)),
            stop=int(fields.get("stop", 0)),
            replicas=_by_role(fields, "replicas:"),
            scaled=_by_role(fields, "scaled:"),
            concurrency=int(concurrency) if concurrency.isdigit() else None,
            run_id=fields.get("run_id", ""),
            run_since=float(fields.get("run_since", 0)),
            settings=parse_settings(fields),
            evaluate=int(fields.get("evaluate", -1)),
            asked=int(fields.get("asked", 0)),
        )


def parse_settings(fields: Mapping[str, str]) -> dict[str, float]:
    """Settings that people changed, from the fields of a hash: whole numbers as int."""
    found = {name.removeprefix("set:"): value for name, value in fields.items() if name.startswith("set:")}
    return {name: int(value) if value.isdigit() else float(value) for name, value in found.items()}


def _by_role(fields: Mapping[str, str], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): int(value) for name, value in fields.items() if name.startswith(prefix)}


class RunControl:
    """Gives orders, and reads them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def read(self) -> ControlState | None:
        """All orders; None when the broker holds none (a new run, or one that was wiped and is not rebuilt yet)."""
        found = self._connection.run("reading orders", lambda client: client.hgetall(self._connection.keys.run_control))
        if not found:
            return None
        return ControlState.parse({name.decode(): value.decode() for name, value in dict(found).items()})

    def read_finished_steps(self) -> int | None:
        """Read how many steps a finished run has; None while it is not finished. Every role may read this."""
        key = self._connection.keys.run_control
        found: Any = self._connection.run("looking whether the run is finished", lambda c: c.hget(key, "finished"))
        return None if found is None else int(found)

    def read_run(self) -> tuple[str, float]:
        """Read the identity of the run that has the name, empty where none can be read, and when it began."""
        key = self._connection.keys.run_control
        try:
            found: Any = self._connection.run("looking for the run", lambda c: c.hmget(key, "run_id", "run_since"))
        except redis.ResponseError:
            # A key of another type is mended by the trainer.
            return "", 0.0
        return (found[0] or b"").decode(), float(found[1] or 0)

    def order_position(self) -> bytes:
        """Return the present position in the stream of orders: read it before the orders, for ``wait_order``."""
        keys = self._connection.keys
        found: Any = self._connection.run("looking for orders", lambda client: client.xrevrange(keys.orders, count=1))
        return bytes(found[0][0]) if found else b"0-0"

    def wait_order(self, position: bytes, timeout_ms: int = BLOCK_MS) -> None:
        """Return when somebody gave an order since ``position``, at the latest after the timeout.

        What happens to slots and groups wakes nobody here.
        """
        keys = self._connection.keys
        self._connection.run("waiting for orders", lambda client: client.xread({keys.orders: position}, 1, timeout_ms))

    def pause(self, mode: PauseMode, by: str) -> bool:
        """Pause, or resume with ``none``; False if it was so already."""
        return self._give("pause", mode, by)

    def checkpoint(self, by: str) -> int:
        """Ask the trainer for a checkpoint as soon as its step is done; the order's number."""
        return int(self._connection.run_script("set_run_control", "checkpoint", "", by))

    def stop(self, by: str) -> int:
        """Ask the supervisor to end the run in order; the order's number."""
        return int(self._connection.run_script("set_run_control", "stop", "", by))

    def scale(self, role: str, replicas: int, by: str) -> bool:
        """Ask the supervisor for so many replicas; False if that many were asked for already."""
        return self._give(f"replicas:{role}", replicas, by)

    def evaluate(self, version: int, by: str) -> bool:
        """Ask the feeder for an evaluation of this weight version, as soon as it is there; False if it was asked so."""
        return self._give("evaluate", version, by)

    def _give(self, order: str, value: str | int, by: str) -> bool:
        return bool(self._connection.run_script("set_run_control", order, value, by) == b"ok")
