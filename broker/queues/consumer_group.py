"""Consumer groups on streams: reading, leases, and taking over the work of silent consumers.

At-least-once: an entry stays pending until its result is published in the same atomic step; work of a silent worker
is claimed by another after the lease.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
import redis

from broker.connection.connection import GONE, Connection, error_code
from broker.connection.counters import LEASES_EXPIRED, add_counts
from schemas.codec import Message
from schemas.errors import InfraError

M = TypeVar("M", bound=Message)
T = TypeVar("T")
AT_ONCE = 64
"""Samples in one call of a script: the server does nothing else meanwhile."""
Entry = tuple[bytes, dict[bytes, bytes]]


class Delivery(msgspec.Struct, Generic[M], frozen=True, gc=False):
    """A message handed to a worker, with its entry in the stream.

    version: the least weight version to work with (tasks). redelivered: another worker may have done a part.
    """

    entry_id: bytes
    stream: str
    message: M
    version: int = 0
    redelivered: bool = False


class ConsumerGroup:
    """A consumer of a group: reads new entries, its own pending ones after a lost reply, and stale ones of others."""

    def __init__(
        self, connection: Connection, streams: list[str], group: str, consumer: str, max_deliveries: int
    ) -> None:
        self._connection = connection
        self._streams = streams
        self._group = group
        self._consumer = consumer
        self._max_deliveries = max_deliveries
        self._held: dict[str, set[bytes]] = {stream: set() for stream in streams}
        self._losses = -1
        self._undated: dict[str, dict[bytes, float]] = {stream: {} for stream in streams}
        self._ensure_groups()

    def _ensure_groups(self) -> None:
        for stream in self._streams:
            ensure_group(self._connection, stream, self._group)

    def _read(self, count: int, block_ms: int, streams: list[str] | None = None) -> list[tuple[str, Entry, int]]:
        if self._losses != self._connection.losses:
            # A reply may have been lost after the server gave us entries: look at what is pending for us.
            self._losses = self._connection.losses
            self._ensure_groups()
            stranded = self._fetch("0", count=10_000, block_ms=None)
            fresh = [(stream, entry) for stream, entry in stranded if entry[0] not in self._held[stream]]
            if fresh:
                # Of a dead worker of this name, or of a lost answer: a part may be done. Negative says so.
                return [(stream, entry, -self._deliveries(stream, entry[0])) for stream, entry in self._take(fresh)]
        return [(stream, entry, 1) for stream, entry in self._take(self._fetch(">", count, block_ms, streams))]

    def _fetch(
        self, position: str, count: int, block_ms: int | None, streams: list[str] | None = None
    ) -> list[tuple[str, Entry]]:
        reply: Any = self._with_group(
            f"reading {self._group}",
            lambda client: client.xreadgroup(
                self._group,
                self._consumer,
                dict.fromkeys(streams or self._streams, position),
                count=count,
                block=block_ms,
            ),
        )
        pairs = reply.items() if isinstance(reply, dict) else reply or []
        found: list[tuple[str, Entry]] = []
        for stream, entries in pairs:
            batch = entries[0] if entries and isinstance(entries[0], list) else entries
            found += [(stream.decode(), entry) for entry in batch]
        return found

    def _with_group(self, what: str, operation: Callable[..., Any], *args: Any) -> Any:
        """An operation on groups, which are made again when somebody deleted them or their streams."""
        return with_group(self._connection, self._ensure_groups, lambda: self._connection.run(what, operation, *args))

    def _take(self, entries: list[tuple[str, Entry]]) -> list[tuple[str, Entry]]:
        for stream, entry in entries:
            self._held[stream].add(entry[0])
        return entries

    def _release(self, stream: str, entry_id: bytes) -> None:
        self._held[stream].discard(entry_id)

    def renew_leases(self) -> None:
        """Renew the leases of all entries that this worker holds. Call from a thread of its own."""
        for stream, held in self._held.items():
            ids = list(held.copy())
            if ids:
                self._claim_for_ourselves(stream, ids)

    def _claim_for_ourselves(self, stream: str, ids: list[bytes]) -> None:
        self._with_group(
            "renewing leases",
            lambda client: client.xclaim(
                stream, self._group, self._consumer, min_idle_time=0, message_ids=ids, justid=True
            ),
        )

    def _claim_stale(self, lease_s: float, count: int) -> list[tuple[str, Entry, int]]:
        claimed: list[tuple[str, Entry, int]] = []
        for stream in self._streams:
            self._undate(stream, lease_s)
            reply: Any = self._with_group(
                "claiming stale work",
                lambda client, stream: client.xautoclaim(
                    stream, self._group, self._consumer, min_idle_time=int(lease_s * 1000), count=count
                ),
                stream,
            )
            for entry in reply[1]:
                if entry[0] in self._held[stream]:
                    continue
                self._held[stream].add(entry[0])
                claimed.append((stream, entry, self._deliveries(stream, entry[0])))
        add_counts(self._connection, {f"{LEASES_EXPIRED}:{self._group}": len(claimed)})
        return claimed

    def _deliveries(self, stream: str, entry_id: bytes) -> int:
        """Return how often the server has handed an entry out."""
        details: Any = self._with_group(
            "counting deliveries",
            lambda client: client.xpending_range(stream, self._group, entry_id, entry_id, 1),
        )
        return int(details[0]["times_delivered"]) if details else 1

    def _undate(self, stream: str, lease_s: float) -> None:
        """Leases count by the server's clock. After it was set back, work of the dead looks as if just delivered.

        What looks so for a whole lease, by our own clock, gets a date again and expires as usual.
        """
        pending: Any = self._with_group(
            "looking at leases", lambda client: client.xpending_range(stream, self._group, "-", "+", 1000)
        )
        now = time.monotonic()
        # A worker that renews its lease is seen within the same millisecond now and then, but not every time.
        fresh = {item["message_id"] for item in pending if item["time_since_delivered"] == 0}
        since = self._undated[stream]
        self._undated[stream] = {entry: since.get(entry, now) for entry in fresh}
        for item in pending:
            entry = item["message_id"]
            if entry in fresh and now - since.get(entry, now) > lease_s:
                self._with_group(
                    "dating leases",
                    lambda client, entry, owner: client.xclaim(
                        stream, self._group, owner, min_idle_time=0, message_ids=[entry], idle=0, justid=True
                    ),
                    entry,
                    item["consumer"],
                )


def number(text: bytes | None) -> int:
    """Parse a non-negative integer field; -1 if it is none."""
    return int(text) if text is not None and text.isdigit() else -1


def with_group(connection: Connection, ensure: Callable[[], None], operation: Callable[[], T]) -> T:
    """Run an operation that needs consumer groups, making them again when they are gone, until the deadline."""
    end = time.monotonic() + connection.deadline_s
    while True:
        try:
            return operation()
        except redis.ResponseError as error:
            if error_code(error) not in GONE:
                raise
            if time.monotonic() > end:
                raise InfraError(f"consumer groups vanish as fast as they are made: {error}") from error
        ensure()


def groups_of(client: redis.Redis, stream: str) -> list[dict[str, Any]]:
    """What XINFO GROUPS says of a stream; nothing where the stream is gone, whenever it went."""
    try:
        groups: Any = client.xinfo_groups(stream)
    except redis.ResponseError as error:
        if "no such key" not in str(error):
            raise
        return []
    return list(groups)


def ensure_group(connection: Connection, stream: str, group: str) -> None:
    """Make stream and group, from the first entry on, if they are not there."""

    def create(client: redis.Redis) -> None:
        # Looked at first: making one is refused when memory is full, also one that is there.
        if any(info["name"] == group.encode() for info in groups_of(client, stream)):
            return
        try:
            client.xgroup_create(stream, group, id="0", mkstream=True)
        except redis.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    connection.run(f"creating group {group}", create)
