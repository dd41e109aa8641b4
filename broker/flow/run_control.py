"""Users' orders to a running run: pause, resume, checkpoint, stop, replicas. The broker keeps them.

Each order has a number, which only grows. A service's heartbeat says which numbers it has acknowledged, so "done" is
what the services report, and an order survives their restarts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self, get_args

import msgspec
import redis

from broker.connection.connection import BLOCK_MS, RunData
from schemas.control_api.base import PauseMode

MODES: tuple[PauseMode, ...] = get_args(PauseMode)


@dataclass(frozen=True)
class ControlState:
    """The orders that are in force now.

    pause: freeze stops every token and step at once, drain admits nothing new. pause_id: number of the last pause or
    resume; checkpoint, stop: numbers of the last such order, 0 for none. by, since: who paused or resumed, and when
    (Unix seconds). replicas: wanted, by role; scaled: number of the last such order, by role. settings: those that
    users changed, by name, see SettingsChange in schemas/control_api/orders.py. evaluate: weight version to evaluate,
    -1 for none. mismatch: process of each quarantined generator, by name. asked: number of questions to the policy so
    far. run_id, run_since: identity of the run (schemas/run_record.py), empty if unknown, and when its first attempt
    began (Unix seconds).
    """

    pause: PauseMode = "none"
    pause_id: int = 0
    by: str = ""
    since: float = 0.0
    checkpoint: int = 0
    stop: int = 0
    replicas: Mapping[str, int] = field(default_factory=dict)
    scaled: Mapping[str, int] = field(default_factory=dict)
    run_id: str = ""
    run_since: float = 0.0
    settings: Mapping[str, int | float] = field(default_factory=dict)
    evaluate: int = -1
    asked: int = 0
    mismatch: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, fields: Mapping[str, str]) -> Self:
        """Parse the hash in the broker; an unknown mode of pause counts as ``none``."""
        by_name = {
            "replicas": with_prefix(fields, "replicas:"),
            "scaled": with_prefix(fields, "scaled:"),
            "settings": parse_settings(fields),
            "mismatch": with_prefix(fields, "mismatch:"),
        }
        pause = fields.get("pause") if fields.get("pause") in MODES else "none"
        return msgspec.convert({**fields, **by_name, "pause": pause}, cls, strict=False)


def parse_settings(fields: Mapping[str, str]) -> dict[str, float]:
    """Parse the settings that users changed from the fields of a hash; whole numbers as int."""
    texts = with_prefix(fields, "set:")
    return {name: int(value) if value.isdigit() else float(value) for name, value in texts.items()}


def with_prefix(fields: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Return the fields whose names have the prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)}


class RunControl(RunData):
    """Gives orders, and reads them."""

    def read(self) -> ControlState | None:
        """Read all orders; None if the broker has none (a new run, or one that was deleted and is not rebuilt yet)."""
        found = self._connection.run_command("reading orders", "hgetall", self._keys.run_control)
        if not found:
            return None
        return ControlState.parse({name.decode(): value.decode() for name, value in dict(found).items()})

    def read_finished_steps(self) -> int | None:
        """Read the number of steps of a finished run, None before it is finished. Every role may read this."""
        found = self._connection.run_command(
            "looking whether the run is finished", "hget", self._keys.run_control, "finished"
        )
        return None if found is None else int(found)

    def read_run(self) -> tuple[str, float]:
        """Read the identity of the run that has the name, "" if it can't be read, and when it began."""
        key = self._keys.run_control
        try:
            found = self._connection.run_command("looking for the run", "hmget", key, "run_id", "run_since")
        except redis.ResponseError:
            # The trainer repairs a key of the wrong type.
            return "", 0.0
        return (found[0] or b"").decode(), float(found[1] or 0)

    def order_position(self) -> bytes:
        """Return the current position in the stream of orders: read it before the orders, for ``wait_order``."""
        return self._connection.newest_entry("looking for orders", self._keys.orders)

    def wait_order(self, position: bytes, timeout_ms: int = BLOCK_MS) -> None:
        """Wait until an order was given since ``position``, or until the timeout.

        Changes of slots and groups do not end the wait.
        """
        self._connection.run_command("waiting for orders", "xread", {self._keys.orders: position}, 1, timeout_ms)

    def pause(self, mode: PauseMode, by: str) -> bool:
        """Pause, or resume with ``none``; False if the run is in this mode already."""
        return self._give("pause", mode, by)

    def checkpoint(self, by: str) -> int:
        """Order a checkpoint after the current step; return the order's number."""
        return int(self._connection.run_script("set_run_control", "checkpoint", "", by))

    def stop(self, by: str) -> int:
        """Order the supervisor to stop the run cleanly; return the order's number."""
        return int(self._connection.run_script("set_run_control", "stop", "", by))

    def scale(self, role: str, replicas: int, by: str) -> bool:
        """Order a number of replicas from the supervisor; False if this number was ordered already."""
        return self._give(f"replicas:{role}", replicas, by)

    def evaluate(self, version: int, by: str) -> bool:
        """Order an evaluation of a weight version once it exists; False if it was ordered already."""
        return self._give("evaluate", version, by)

    def quarantine(self, generator: str, process: str, by: str) -> bool:
        """Order a generator to take no more tasks as long as it is this process; False if that is ordered already."""
        return self._give(f"mismatch:{generator}", process, by)

    def _give(self, order: str, value: str | int, by: str) -> bool:
        return bool(self._connection.run_script("set_run_control", order, value, by) == b"ok")
