"""What people ask of the trainer, followed between two steps: pause, checkpoint. And the memory of a pause on disk.

A freeze is acknowledged when no step is under way, a drain when there is nothing left to train and a checkpoint
covers all that was. A pause that was seen is written beside the checkpoints before it is acknowledged, so that it
outlives the loss of broker and trainer together.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from broker.client import Broker
from broker.connection.connection import BLOCK_MS
from broker.flow.progress import Progress
from broker.flow.run_control import ControlState
from schemas.errors import BrokerLost, InfraError
from schemas.lifecycle import StopFlag

FILE = "PAUSE"

log = structlog.get_logger()


class PauseFollower:
    """``acknowledged`` goes into the heartbeat; ``changed`` is called when it has changed, to send one at once.

    held_s: all seconds that pauses took. checkpoint: makes everything so far durable, unless it is already.
    """

    def __init__(
        self, folder: Path, broker: Broker, checkpoint: Callable[[], None], changed: Callable[[], None] = lambda: None
    ) -> None:
        self._file = folder / FILE
        self._broker = broker
        self._checkpoint = checkpoint
        self.changed = changed
        self._written: ControlState | None = None
        self._drained = -1
        self.paused = False
        self.held_s = 0.0
        self.acknowledged: dict[str, int] = {}

    def restore(self, progress: Progress) -> None:
        """Take the pause that was seen last, for a broker that may have forgotten it."""
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
            known = ControlState(found["pause"], int(found["pause_id"]), str(found["by"]), float(found["since"]))
        except (OSError, ValueError, KeyError, TypeError):
            return
        progress.note_pause(known)

    def follow(self, orders: ControlState, drained: bool = False) -> bool:
        """Do what is asked; whether the trainer has to hold. ``drained``: nothing is left to train."""
        self._remember(orders)
        if orders.checkpoint > self.acknowledged.get("checkpoint", 0):
            self._checkpoint()
            self._obey("checkpoint", orders.checkpoint)
        if orders.pause == "drain" and drained and self._drained != orders.pause_id:
            self._checkpoint()
            # Nothing is admitted until the next order, so it stays that way.
            self._drained = orders.pause_id
        hold = orders.pause == "freeze" or (orders.pause == "drain" and self._drained == orders.pause_id)
        if hold != self.paused:
            log.info("paused" if hold else "going on", by=orders.by)
        self.paused = hold
        if hold or orders.pause == "none":
            self._obey("pause", orders.pause_id)
        return hold

    def hold(self, stop: StopFlag, progress: Progress) -> bool:
        """Wait while a freeze is ordered; whether there was one. BrokerLost when the broker has lost its orders."""
        held = False
        while not stop:
            position = self._broker.ledger.change_position()
            orders = self._broker.run_control.read()
            if orders is None:
                raise BrokerLost("the broker has forgotten what was asked of this run")
            progress.note_pause(orders)
            if not self.follow(orders):
                return held
            held = True
            self._wait_change(position)
        return held

    def wait(self, seen: int) -> None:
        """Until the orders are others than those with the number ``seen``, a second at most."""
        position = self._broker.ledger.change_position()
        orders = self._broker.run_control.read()
        if orders is not None and orders.pause_id == seen:
            self._wait_change(position)

    def _wait_change(self, position: bytes) -> None:
        started = time.monotonic()
        self._broker.ledger.wait_change(position, BLOCK_MS)
        self.held_s += time.monotonic() - started

    def _obey(self, order: str, number: int) -> None:
        if self.acknowledged.get(order) != number:
            self.acknowledged[order] = number
            self.changed()

    def _remember(self, orders: ControlState) -> None:
        seen = ControlState(orders.pause, orders.pause_id, orders.by, orders.since)
        if seen == self._written:
            return
        fields = {"pause": seen.pause, "pause_id": seen.pause_id, "by": seen.by, "since": seen.since}
        aside = self._file.with_suffix(".writing")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with aside.open("w", encoding="utf-8") as stream:
                stream.write(json.dumps(fields))
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(aside, self._file)
        except OSError as error:
            raise InfraError(f"cannot write {self._file}: {error}") from error
        self._written = seen
