"""What waits in the streams of a run, how long, and how much came in: one round trip, no bodies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from broker.link import Link

NAMES = ("tasks", "eval_tasks", "trajectories", "scored")


@dataclass(frozen=True)
class Gauge:
    """One stream. waiting: unread entries; pending: read and not done; entered: entries that ever came in.

    oldest: Unix seconds of the oldest entry that waits or is pending, by the broker's clock; None if there is none.
    """

    name: str
    length: int
    waiting: int
    pending: int
    entered: int
    oldest: float | None


def read_gauges(link: Link) -> list[Gauge]:
    """All streams at one moment."""
    return [_gauge(name, row) for name, row in zip(NAMES, link.script("gauge"), strict=True)]


def _gauge(name: str, row: list[Any]) -> Gauge:
    length, read, lag, pending = (int(value) for value in row[:4])
    # Redis gives no lag when an entry was deleted before it was read; the length bounds it then.
    waiting = lag if lag >= 0 else max(0, length - pending)
    oldest = [int(id.partition(b"-")[0]) / 1000 for id in row[4:6] if id]
    return Gauge(name, length, waiting, pending, read + waiting, min(oldest, default=None))
