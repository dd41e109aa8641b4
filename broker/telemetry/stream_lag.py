"""Lag of a run's streams: what waits, how long, and how much came in; one round trip, no bodies.

A server that comes back with its append-only file has forgotten some of what was read, and says for ever after that
more waits than does. Its surplus is known whenever nothing follows the last delivered entry, and taken off.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from broker.connection.connection import Connection

NAMES = ("tasks", "eval_tasks", "trajectories", "scored")


@dataclass(frozen=True)
class StreamLag:
    """Lag of a stream. waiting: unread entries; pending: read and not done; entered: entries that ever came in.

    oldest: Unix seconds of the oldest entry that waits or is pending, by the broker's clock; None if there is none.
    """

    name: str
    length: int
    waiting: int
    pending: int
    entered: int
    oldest: float | None


def read_stream_lags(connection: Connection, surplus: MutableMapping[str, int] | None = None) -> list[StreamLag]:
    """All streams at one moment. surplus: kept by the caller from one look to the next, for exact counts."""
    kept = {} if surplus is None else surplus
    return [
        _stream_lag(name, row, kept) for name, row in zip(NAMES, connection.run_script("measure_streams"), strict=True)
    ]


def _stream_lag(name: str, row: list[Any], surplus: MutableMapping[str, int]) -> StreamLag:
    length, read, lag, pending = (int(value) for value in row[:4])
    if not row[5]:
        surplus[name] = max(0, lag)
        waiting = 0
    elif lag >= 0:
        waiting = min(length, max(1, lag - surplus.get(name, 0)))
    else:
        # Redis gives no lag when an entry was deleted before it was read; the length bounds it then.
        waiting = max(1, length - pending)
    oldest = [int(id.partition(b"-")[0]) / 1000 for id in row[4:6] if id]
    return StreamLag(name, length, waiting, pending, read + (lag if lag >= 0 else waiting), min(oldest, default=None))
