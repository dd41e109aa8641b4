"""Records of a run in its folder: use of machines, queue lengths and alerts.

The supervisor watches, or else a control plane. A folder that can't be written is logged once and disturbs nothing.
"""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import structlog

from deploy.control_plane.alerts.alerts import STUCK, Alert, AlertRules
from deploy.control_plane.alerts.notify import Notifier
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

    tell: adds a line to the timeline. ends: notify of the end by the status; a supervisor calls ``ended`` instead.
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
        for alert, fired in self._rules.observe(status, now):
            line = {"time": now, "name": alert.name, "fired": fired, "level": alert.level}
            self._append(ALERTS, {**line, "text": alert.text})
            if fired:
                self._tell(f"alert {alert.name}: {alert.text}", alert.level)
                self._send("stuck" if alert.name == STUCK else "alert", alert.text, status)
            else:
                self._tell(f"alert {alert.name} is over", "info")
        if self._ends and status.state in ENDS and self._state not in ("", *ENDS):
            self.ended(status.state, status.cause, status)
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

    def _send(self, event: Occasion, text: str, status: RunStatus | None) -> None:
        """Notify users. Chat systems show the text alone, so it contains every fact."""
        where = "" if status is None else f" at step {status.step} of {status.steps}"
        held_out = status.evaluation if status else None
        notice = {
            "run": self._run,
            "event": event,
            "text": f"Tidemill run {self._run}{where}: {text}",
            "step": status.step if status else 0,
            "steps": status.steps if status else 0,
            "reward": status.reward if status else None,
            "heldout_reward": held_out.mean if held_out else None,
            "accuracy": held_out.accuracy if held_out else None,
            "time": time.time(),
        }
        self._notifier.tell(event, notice)

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
    services = {}
    for service in status.services:
        used = {name: round(service.figures[name], 3) for name in USED if name in service.figures}
        if service.live and used:
            services[service.name] = used
    # What the trainer has taken stays there until a checkpoint covers it: that is no queue.
    queues = {one.name: one.waiting + (0 if one.name == "scored" else one.pending) for one in status.streams}
    line = {"time": round(now, 1), "services": services, "queues": queues, "slots": status.ledger.active}
    return {**line, "broker_bytes": status.memory_bytes}
