"""Lag of a run's streams: how many entries wait, how long, and how many came in; one round trip, without bodies.

A server that was restored from its append-only file has lost some read positions and reports too many waiting entries
afterwards. The surplus is measured whenever no entry follows the last delivered one, and subtracted.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from broker.connection.connection import Connection

NAMES = ("tasks", "eval_tasks", "trajectories", "scored")


@dataclass(frozen=True)
class StreamLag:
    """Lag of a stream. waiting: unread entries; pending: read and not done; entered: all entries so far.

    oldest: Unix seconds of the oldest entry that waits or is pending, by the broker's clock; None if there is none.
    """

    name: str
    length: int
    waiting: int
    pending: int
    entered: int
    oldest: float | None


def read_stream_lags(connection: Connection, surplus: MutableMapping[str, int] | None = None) -> list[StreamLag]:
    """Measure all streams at one moment. surplus: state that the caller keeps between calls, for exact counts."""
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
        # Redis reports no lag if an entry was deleted before it was read; then the length bounds it.
        waiting = max(1, length - pending)
    oldest = [int(id.partition(b"-")[0]) / 1000 for id in row[4:6] if id]
    return StreamLag(name, length, waiting, pending, read + (lag if lag >= 0 else waiting), min(oldest, default=None))
