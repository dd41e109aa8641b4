"""The ledger: which prompt groups are in the pipeline, and how every other one ended.

A slot is charged when a group is admitted and returns when it was trained, dropped or
failed; nothing else moves it. Invariant: admitted == active + trained + dropped + failed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import redis

from broker.link import BLOCK_MS, Link
from schemas.codec import encode
from schemas.messages import Task

Answer = Literal["ok", "full", "paused", "done", "moved"]


@dataclass(frozen=True)
class Admission:
    """Answer to one attempt to admit. cursor: the next task id to admit."""

    answer: Answer
    cursor: int


@dataclass(frozen=True)
class LedgerState:
    """A consistent look at the ledger. ``dropped`` and ``failed`` count groups by reason.

    samples_live: published training samples of groups that hold a slot.
    """

    state: str
    paused: bool
    step: int
    version: int
    cursor: int
    active: int
    capacity: int
    total: int
    admitted: int
    trained: int
    dropped: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    samples_published: int = 0
    samples_trained: int = 0
    samples_dropped: int = 0
    samples_failed: int = 0
    samples_live: int = 0
    tokens_generated: int = 0
    started: float = 0.0
    epoch: int = 0

    @property
    def balanced(self) -> bool:
        """Whether the invariant holds."""
        ended = self.trained + sum(self.dropped.values()) + sum(self.failed.values())
        return self.admitted == self.active + ended


class Ledger:
    """Admission, control state, and a look at it all."""

    def __init__(self, link: Link, max_bytes: int) -> None:
        self._link = link
        self._max_bytes = max_bytes

    def admit(self, task: Task) -> Admission:
        """Charge a slot and queue the task, whose id must be the cursor."""
        answer, cursor = self._link.script("admit", task.task_id, encode(task, self._max_bytes), task.n)
        return Admission(answer.decode(), int(cursor or 0))

    def change_position(self) -> bytes:
        """Take this before looking at the ledger, and hand it to ``wait_change``."""
        keys = self._link.keys
        found: Any = self._link.run("looking for changes", lambda client: client.xrevrange(keys.changes, count=1))
        return bytes(found[0][0]) if found else b"0-0"

    def wait_change(self, position: bytes, timeout_ms: int = BLOCK_MS) -> None:
        """Return when slots or control state changed since ``position``, at the latest after the timeout."""
        keys = self._link.keys
        self._link.run("waiting for room", lambda client: client.xread({keys.changes: position}, 1, timeout_ms))

    def set(self, name: Literal["paused", "state", "slots", "total"], value: str | int) -> None:
        """Change control state; services see it at their next admission."""
        self._link.script("control", name, value)

    def state(self) -> LedgerState:
        """Read everything at one moment."""
        keys = self._link.keys

        def read(client: redis.Redis) -> list[Any]:
            pipe = client.pipeline(transaction=True)
            pipe.hgetall(keys.ctl)
            pipe.hgetall(keys.counts)
            pipe.zrange(keys.slots, 0, -1)
            pipe.hgetall(keys.samples)
            return list(pipe.execute())

        ctl, counts, slots, samples = self._link.run("reading the ledger", read)
        active = {member.decode() for member in slots}
        control = _text(ctl)
        count = {name: int(value) for name, value in _text(counts).items()}

        def number(name: str, default: int = 0) -> int:
            return int(control.get(name, default))

        return LedgerState(
            state=control.get("state", "starting"),
            paused=control.get("paused") == "1",
            step=number("step"),
            version=number("version"),
            cursor=number("cursor"),
            active=len(active),
            capacity=number("slots"),
            total=number("total"),
            admitted=count.get("admitted", 0),
            trained=count.get("trained", 0),
            dropped=_reasons(count, "dropped:"),
            failed=_reasons(count, "failed:"),
            samples_published=count.get("published", 0),
            samples_trained=count.get("samples_trained", 0),
            samples_dropped=count.get("samples_dropped", 0),
            samples_failed=count.get("samples_failed", 0),
            tokens_generated=count.get("tokens_generated", 0),
            epoch=number("epochn"),
            started=float(control.get("started", 0)),
            samples_live=sum(
                entry != "-" and sample.partition(":")[0] in active for sample, entry in _text(samples).items()
            ),
        )


def _text(mapping: object) -> dict[str, str]:
    if not isinstance(mapping, dict):
        return {}
    return {key.decode(): value.decode() for key, value in mapping.items()}


def _reasons(count: dict[str, int], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): value for name, value in count.items() if name.startswith(prefix)}
