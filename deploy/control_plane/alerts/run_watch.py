"""Records of a run in its folder: use of machines, queue lengths and alerts.

The supervisor watches what it has started; a control plane that sees no supervisor watches itself. A folder that cannot
be written is logged once and does not disturb the run.
"""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import structlog

from deploy.control_plane.alerts.alerts import STUCK, Alert, AlertChange, AlertRules
from deploy.control_plane.alerts.notify import Notice, Notifier
from deploy.control_plane.files.resources import read_alerts
from schemas.config import TidemillConfig
from schemas.config.deploy import Occasion
from schemas.control_api.status import RunStatus
from schemas.run_folder import ALERTS, RESOURCES
from schemas.system.files import atomic_write

EVERY_S = 10.0
"""Seconds between two lines of the resources' file."""
MOST_BYTES = 64 << 20
"""Bytes of the resources' file; of more, the older half is thinned."""
USED = ("cpu", "memory_bytes", "gpu_memory_bytes")
ENDS: tuple[Occasion, ...] = ("finished", "failed", "stopped")

log = structlog.get_logger()
Tell = Callable[[str, Literal["info", "warning", "error"]], None]


class RunWatch:
    """Watches the statuses that one thread passes to it.

    tell: adds a line to the timeline. ends: whether it tells that the run has ended from its status; the supervisor
    knows that better, and says so with ``ended``.
    """

    def __init__(self, config: TidemillConfig, tell: Tell, ends: bool = True) -> None:
        self._folder, self._tell, self._ends = config.folder, tell, ends
        fired = (one for one in read_alerts(config.folder) if one.over is None)
        before = {one.name: Alert(one.name, one.level, one.text) for one in fired}
        self._rules = AlertRules(config.notify.stuck_s, before)
        self._notifier = Notifier(config.notify, config.base, lambda text: tell(text, "warning"))
        self._run = config.run.name
        self._due = 0.0
        self._state = ""
        self._broken = False
        self._last: RunStatus | None = None

    def observe(self, status: RunStatus) -> None:
        """Look at a status; returns soon."""
        now = time.time()
        for change in self._rules.observe(status, now):
            self._note(change)
            if change.fired:
                occasion: Occasion = "stuck" if change.alert.name == STUCK else "alert"
                self._send(occasion, f"{change.alert.text}", status)
        if self._ends and status.state in ENDS and self._state not in ("", *ENDS):
            for end in ENDS:
                if status.state == end:
                    self.ended(end, status.cause, status)
        if status.state != "unreachable":
            self._state, self._last = status.state, status
            if time.monotonic() >= self._due:
                self._due = time.monotonic() + EVERY_S
                self._append(RESOURCES, resource_line(status, now))
                self._thin()

    def ended(self, how: Occasion, cause: str, status: RunStatus | None = None) -> None:
        """Notify users how the run ended."""
        self._send(how, f"{how}: {cause}" if cause else how, status or self._last)

    def close(self) -> None:
        """Wait a moment for what is under way."""
        self._notifier.wait()

    def _note(self, change: AlertChange) -> None:
        alert = change.alert
        line = {"time": change.time, "name": alert.name, "fired": change.fired, "level": alert.level}
        self._append(ALERTS, {**line, "text": alert.text})
        if change.fired:
            self._tell(f"alert {alert.name}: {alert.text}", alert.level)
        else:
            self._tell(f"alert {alert.name} is over", "info")

    def _send(self, event: Occasion, text: str, status: RunStatus | None) -> None:
        where = "" if status is None else f" at step {status.step} of {status.steps}"
        self._notifier.tell(
            Notice(
                run=self._run,
                event=event,
                text=f"Tidemill run {self._run}{where}: {text}",
                step=status.step if status else 0,
                steps=status.steps if status else 0,
                reward=status.reward if status else None,
                heldout_reward=status.evaluation.mean if status and status.evaluation else None,
                accuracy=status.evaluation.accuracy if status and status.evaluation else None,
                time=time.time(),
            )
        )

    def _thin(self) -> None:
        """Of the resources, if their file is beyond its bound, keep every second line of the older half."""
        file = self._folder / RESOURCES
        with contextlib.suppress(OSError):
            if file.stat().st_size > MOST_BYTES:
                lines = file.read_bytes().splitlines(keepends=True)
                older = lines[: len(lines) // 2]
                atomic_write(file, b"".join(older[::2] + lines[len(older) :]))

    def _append(self, name: str, line: dict[str, Any]) -> None:
        try:
            with (self._folder / name).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
        except OSError as error:
            if not self._broken:
                log.warning("what is watched is not written", file=str(Path(self._folder) / name), error=str(error))
            self._broken = True


def resource_line(status: RunStatus, now: float) -> dict[str, Any]:
    """Resources of the services and lengths of the queues, as one line of the file."""
    services = {
        service.name: {name: round(service.figures[name], 3) for name in USED if name in service.figures}
        for service in status.services
        if service.live
    }
    # What the trainer has taken stays there until a checkpoint covers it: that is no queue.
    queues = {
        stream.name: stream.waiting + (0 if stream.name == "scored" else stream.pending) for stream in status.streams
    }
    line: dict[str, Any] = {"time": round(now, 1), "services": {name: used for name, used in services.items() if used}}
    return {**line, "queues": queues, "slots": status.ledger.active, "broker_bytes": status.memory_bytes}
