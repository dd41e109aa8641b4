"""What people and the control plane see of a run: heartbeats, events, dead letters."""

from __future__ import annotations

from typing import Any, Literal

from schemas.codec import Message


class Heartbeat(Message, kw_only=True, tag="heartbeat"):
    """One sign of life of a service. The free-form figures are for people.

    acknowledged: number of the newest order of each kind that it has followed (broker/flow/run_control.py).
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


class Event(Message, kw_only=True, tag="event"):
    """Something people want to see in a timeline. level: info, warning or error."""

    name: str
    service: str
    level: Literal["info", "warning", "error"] = "info"
    text: str = ""
    data: dict[str, Any] = {}


class DeadLetter(Message, kw_only=True, tag="dead_letter"):
    """A message that can never be processed, whole, with the reason."""

    source: str
    reason: str
    deliveries: int
    payload: bytes
    task_id: int = -1
    sample: int = -1
