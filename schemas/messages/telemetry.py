"""Telemetry of a run for the control plane: heartbeats, events, dead letters."""

from typing import Any, Literal

from schemas.codec import Message
from schemas.system.processes import identify_process

QUARANTINED = "mismatch"
"""State of a generator that takes no tasks because its log-probabilities are not those of the policy."""
ASLEEP = "asleep"
"""State of a generator whose GPUs the trainer has at the moment."""


class Heartbeat(Message, kw_only=True, tag="heartbeat"):
    """Heartbeat of a service, sent each second. time: Unix seconds by the broker's clock. figures: for display.

    acknowledged: number of the newest order that the service followed, by kind of order (broker/flow/run_control.py).
    place: the running system and the process namespace in which ``pid`` counts; "" if unknown. pool: of a generator, ""
    in a run without pools. devices: those that the process computes on. device_ms: milliseconds of theirs by use, since
    the process began; counted_ms: those of them that the broker has counted. uncounted: it had no counts when the last
    heartbeat came. software: versions of the GPUs' driver and of packages, and the GPUs' names as ``gpu``.
    """

    service: str
    role: str
    host: str
    pid: int
    state: str
    version: int = -1
    time: float = 0.0
    figures: dict[str, float] = {}
    acknowledged: dict[str, int] = {}
    place: str = ""
    pool: str = ""
    devices: int = 0
    device_ms: dict[str, int] = {}
    counted_ms: dict[str, int] = {}
    uncounted: bool = False
    software: dict[str, str] = {}

    @property
    def process(self) -> str:
        """Return what tells its process from others of the same name, as ``identify_process`` does."""
        return identify_process(self.host, self.place, self.pid)


class Event(Message, kw_only=True, tag="event"):
    """An event of the run's timeline. level: info, warning or error."""

    name: str
    service: str
    level: Literal["info", "warning", "error"] = "info"
    text: str = ""
    data: dict[str, Any] = {}


class DeadLetter(Message, kw_only=True, tag="dead_letter"):
    """A whole message that can never be processed, with the reason."""

    source: str
    reason: str
    deliveries: int
    payload: bytes
    task_id: int = -1
    sample: int = -1
