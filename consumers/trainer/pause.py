"""Orders of users to the trainer, followed between two steps: pause, checkpoint. A pause is also kept on disk.

The trainer acknowledges a freeze when no step is running, and a drain when nothing is left to train and a checkpoint
covers all steps. It writes a pause beside the checkpoints before it acknowledges it, so that the pause outlives the
loss of broker and trainer together.
"""

import json
from collections.abc import Callable
from typing import Any

import structlog

from broker.connection.connection import BLOCK_MS
from broker.flow.run_control import ControlState
from consumers.trainer.context import TrainerContext
from schemas.errors import BrokerLost
from schemas.system.files import atomic_write, disk_errors
from schemas.system.lifecycle import PauseReason, StopFlag

FILE = "PAUSE"

log = structlog.get_logger()


class PauseFollower:
    """Pauses and resumes a trainer, as users order.

    reasons: why the trainer pauses. acknowledged: sent with the heartbeat; ``changed`` is called when it changes, to
    send one at once. save: makes all steps so far durable, unless they are already.
    """

    def __init__(self, context: TrainerContext, save: Callable[[], None]) -> None:
        self._file = context.rank_group.checkpoint_store.folder / FILE
        self._context, self._broker, self._save = context, context.broker, save
        self._written: dict[str, Any] = {}
        self._drained = -1
        self.changed: Callable[[], None] = lambda: None
        self.reasons: frozenset[PauseReason] = frozenset()
        self.acknowledged: dict[str, int] = {}

    def restore(self) -> None:
        """Restore the last pause from disk, in case the broker has lost it."""
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
            known = ControlState(found["pause"], int(found["pause_id"]), str(found["by"]), float(found["since"]))
        except (OSError, ValueError, KeyError, TypeError):
            return
        self._context.progress.note_pause(known)

    def follow(self, control: ControlState, drained: bool = False) -> bool:
        """Follow the orders; True if the trainer has to pause. drained: nothing is left to train."""
        self._remember(control)
        self._context.settings.follow(control.settings)
        if control.checkpoint > self.acknowledged.get("checkpoint", 0):
            self._save()
            self._acknowledge("checkpoint", control.checkpoint)
        if control.pause == "drain" and drained and self._drained != control.pause_id:
            self._save()
            # Nothing is admitted before the next order, so it stays drained.
            self._drained = control.pause_id
        ordered = control.pause == "freeze" or (control.pause == "drain" and self._drained == control.pause_id)
        order: set[PauseReason] = {"ordered"}
        reasons = self.reasons | order if ordered else self.reasons - order
        if bool(reasons) != bool(self.reasons):
            log.info("paused" if reasons else "resumed", by=control.by)
        self.reasons = reasons
        if ordered or control.pause == "none":
            self._acknowledge("pause", control.pause_id)
        return bool(reasons)

    def hold(self, stop: StopFlag, drained: bool = False) -> bool:
        """Wait while paused; return whether it was. drained: as in ``follow``. BrokerLost if the orders are lost."""
        held = False
        while not stop:
            position = self._broker.ledger.change_position()
            control = self._broker.run_control.read()
            if control is None:
                raise BrokerLost("the broker has lost the orders to this run")
            self._context.progress.note_pause(control)
            if not self.follow(control, drained):
                return held
            held = True
            self._wait_change(position)
        return held

    def wait_order_after(self, seen: int) -> None:
        """Wait for an order to pause or resume that is not the one with the number ``seen``, a second at most."""
        position = self._broker.ledger.change_position()
        control = self._broker.run_control.read()
        if control is not None and control.pause_id == seen:
            self._wait_change(position)

    def _wait_change(self, position: bytes) -> None:
        with self._context.timer.phase("paused"):
            self._broker.ledger.wait_change(position, BLOCK_MS)

    def _acknowledge(self, order: str, number: int) -> None:
        if self.acknowledged.get(order) != number:
            self.acknowledged[order] = number
            self.changed()

    def _remember(self, control: ControlState) -> None:
        fields = {name: getattr(control, name) for name in ("pause", "pause_id", "by", "since")}
        if fields == self._written:
            return

        def write() -> None:
            with disk_errors(f"cannot write {self._file}"):
                atomic_write(self._file, json.dumps(fields), durable=True)

        self._context.retry("pause", write)
        self._written = fields
