"""Consumer groups on streams: reading, leases, and claiming the work of silent consumers.

Delivery is at least once: an entry stays pending until the atomic step that publishes its result, and another worker
claims it if its worker is silent for a lease.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec
import redis

from broker.connection.connection import GONE, Connection, RunData, error_code
from broker.connection.counters import LEASES_EXPIRED, add_counts
from broker.connection.stream_pages import Entry, entries_in
from schemas.codec import BadMessage, Message
from schemas.errors import InfraError

Read: TypeAlias = tuple[str, Entry, int]
"""A stream, an entry of it, and its number of deliveries, which is negative if a part of the work may be done."""
M = TypeVar("M", bound=Message)
P = TypeVar("P", bound=tuple[bytes | str | int, ...])
T = TypeVar("T")
AT_ONCE = 64
"""Most samples in one call of a script, during which the server does nothing else."""
BYTES_AT_ONCE = 16 << 20
"""Most bytes in one call of a script, unless a single sample has more."""
LOOK_AT = 1000
"""Pending entries that one call checks for leases from before the server's clock was set back."""


class Delivery(msgspec.Struct, Generic[M], frozen=True, gc=False):
    """A message handed to a worker, with its entry in the stream.

    version: the lowest weight version to work with (tasks). redelivered: another worker may have done a part of it.
    deaths: how many workers died with it, or were silent for a lease (tasks). fruitless: how often generators that
    stayed alive returned it without a new token (tasks).
    """

    entry_id: bytes
    stream: str
    message: M
    version: int = 0
    redelivered: bool = False
    deaths: int = 0
    fruitless: int = 0


class ConsumerGroup(RunData, Generic[M]):
    """A consumer of a group: reads new entries, its own pending ones after a lost reply, and stale ones of others.

    An entry counts as delivered once more if its worker died or was silent for a lease, but not if only a reply was
    lost. renewal: the script that renews leases on these streams. workers: what errors call the group's workers.
    """

    renewal: str
    workers: str

    def __init__(
        self, connection: Connection, streams: list[str], group: str, consumer: str, max_deliveries: int, max_bytes: int
    ) -> None:
        super().__init__(connection, max_bytes)
        self._streams = streams
        self._group = group
        self._consumer = consumer
        self._max_deliveries = max_deliveries
        self._held: dict[str, set[bytes]] = {stream: set() for stream in streams}
        self._losses = -1
        self._suspected: dict[str, dict[bytes, float]] = {stream: {} for stream in streams}
        self._looked: dict[str, bytes] = dict.fromkeys(streams, b"-")
        self._ensure_groups()

    def _ensure_groups(self) -> None:
        for stream in self._streams:
            ensure_group(self._connection, stream, self._group)

    def _read(self, count: int, block_ms: int, streams: list[str] | None = None) -> list[Read]:
        if self._losses != self._connection.losses:
            # The server may have delivered entries in a lost reply, so look at what is pending for this consumer.
            began, self._losses = self._losses < 0, self._connection.losses
            self._ensure_groups()
            stranded = [entry for stream in self._streams for entry in self._take_stranded(stream, died=began)]
            if stranded:
                return [(stream, entry, -times) for stream, entry, times in stranded]
        return [(stream, entry, 1) for stream, entry in self._take(self._fetch(count, block_ms, streams))]

    def _fetch(self, count: int, block_ms: int | None, streams: list[str] | None = None) -> list[tuple[str, Entry]]:
        unread = dict.fromkeys(streams or self._streams, ">")
        reply = self._with_group(
            f"reading {self._group}", "xreadgroup", self._group, self._consumer, unread, count=count, block=block_ms
        )
        return [(stream.decode(), entry) for stream, entry in entries_in(reply)]

    def _with_group(self, what: str, name: str, *args: Any, **options: Any) -> Any:
        """Run a command on groups, by its name in redis-py; create them again if they or their streams were deleted."""
        run = partial(self._connection.run_command, what, name, *args, **options)
        return with_group(self._connection, self._ensure_groups, run)

    def _take(self, entries: list[tuple[str, Entry]]) -> list[tuple[str, Entry]]:
        for stream, entry in entries:
            self._held[stream].add(entry[0])
        return entries

    def _take_stranded(self, stream: str, died: bool) -> list[Read]:
        """Take what is pending for this name but not held: from a lost reply, or from a dead worker of this name."""
        pending = self._with_group(
            "looking at what is pending", "xpending_range", stream, self._group, "-", "+", 10_000, self._consumer
        )
        held = self._held[stream].copy()
        times = {item["message_id"]: item["times_delivered"] for item in pending if item["message_id"] not in held}
        # Renewed first, so that no other worker may claim them from here on.
        taken = set(self._renew(stream, list(times)))
        return self._claim(stream, {entry: count + died for entry, count in times.items() if entry not in taken}, 0)

    def _release(self, stream: str, entry_id: bytes) -> None:
        self._held[stream].discard(entry_id)

    def _decode(self, entries: list[Read]) -> list[Delivery[M]]:
        """Return the deliveries of these entries; an entry that can't be delivered becomes a dead letter."""
        deliveries: list[Delivery[M]] = []
        bodies = self._read_bodies([fields for _, (_, fields), _ in entries])
        for read, body in zip(entries, bodies, strict=True):
            stream, (entry_id, fields), times = read
            if not fields:
                self._release(stream, entry_id)
                continue
            try:
                if body is None:
                    raise BadMessage("its body is not there")
                if abs(times) > self._max_deliveries:
                    raise BadMessage(f"delivered {abs(times)} times, its {self.workers} died or stalled each time")
                deliveries.append(self._deliver(read, body))
            except BadMessage as error:
                self._refuse(read, body, str(error))
                self._release(stream, entry_id)
        return deliveries

    @abstractmethod
    def _read_bodies(self, entries: list[dict[bytes, bytes]]) -> list[bytes | None]:
        """Return the body of each entry, None if it was lost."""

    @abstractmethod
    def _deliver(self, read: Read, body: bytes) -> Delivery[M]:
        """Decode the message of an entry; BadMessage if it can't be used."""

    @abstractmethod
    def _refuse(self, read: Read, body: bytes | None, reason: str) -> None:
        """File a message as a dead letter."""

    def renew_leases(self) -> list[bytes]:
        """Renew the leases of all entries that this worker holds; called from a separate thread.

        Returns the entries that another worker has claimed, which this one no longer holds.
        """
        lost: list[bytes] = []
        for stream, held in self._held.items():
            taken = self._renew(stream, list(held.copy()))
            held.difference_update(taken)
            lost += taken
        return lost

    def _renew(self, stream: str, ids: list[bytes]) -> list[bytes]:
        """Renew the leases of these entries, and return those that another worker has."""
        if not ids:
            return []
        run = partial(self._connection.run_script, self.renewal, stream.rpartition(":")[2], self._consumer, *ids)
        return list(with_group(self._connection, self._ensure_groups, run))

    def claim_stale(self, lease_s: float, count: int) -> list[Delivery[M]]:
        """Claim work of workers that were silent for longer than their lease."""
        claimed: list[Read] = []
        idle = int(lease_s * 1000)
        for stream in self._streams:
            self._redate(stream, lease_s)
            held = self._held[stream].copy()
            # The server scans all pending entries from the oldest, because those of a dead worker may be anywhere.
            most = count + len(held)
            pending = self._with_group(
                "looking for stale work", "xpending_range", stream, self._group, "-", "+", most, idle=idle
            )
            times = {
                item["message_id"]: item["times_delivered"] + self._has_died(item["consumer"])
                for item in pending
                if item["message_id"] not in held
            }
            claimed += self._claim(stream, dict(list(times.items())[:count]), idle)
        add_counts(self._connection, {f"{LEASES_EXPIRED}:{self._group}": len(claimed)})
        return self._decode(claimed)

    def _has_died(self, owner: bytes) -> bool:
        """Return whether the owner of stale work is another worker, or an earlier one of the same name."""
        return owner != self._consumer.encode() or self._losses < 0

    def _claim(self, stream: str, times: dict[bytes, int], idle_ms: int) -> list[Read]:
        """Claim entries idle for ``idle_ms``, set how often they were delivered to ``times``, and hold them.

        Because the count is set, a retry after a lost reply does not count twice.
        """
        found: dict[bytes, Read] = {}
        for count in set(times.values()):
            wanted = [entry for entry, often in times.items() if often == count]
            entries = self._with_group(
                "claiming work", "xclaim", stream, self._group, self._consumer, idle_ms, wanted, retrycount=count
            )
            found |= {entry[0]: (stream, entry, count) for entry in entries}
        self._held[stream].update(found)
        return [found[entry] for entry in times if entry in found]

    def _redate(self, stream: str, lease_s: float) -> None:
        """Repair leases after the server's clock was set back, when work of dead workers looks just delivered.

        An entry that looks so for a whole lease, by the local clock, gets the current time and expires as usual. Each
        call checks the next LOOK_AT entries.
        """
        first = self._looked[stream]
        pending = self._with_group("looking at leases", "xpending_range", stream, self._group, first, "+", LOOK_AT)
        whole = len(pending) < LOOK_AT
        now = time.monotonic()
        # An entry of a live worker may be seen in the millisecond of its renewal, but not every time.
        fresh = {item["message_id"] for item in pending if item["time_since_delivered"] == 0}
        since = self._suspected[stream]
        begin, end = _position(first.strip(b"(-")), None if whole else _position(pending[-1]["message_id"])
        elsewhere = {
            entry: moment
            for entry, moment in since.items()
            if _position(entry) <= begin or (end is not None and _position(entry) > end)
        }
        self._looked[stream] = b"-" if whole else b"(" + pending[-1]["message_id"]
        self._suspected[stream] = elsewhere | {entry: since.get(entry, now) for entry in fresh}
        for item in pending:
            entry = item["message_id"]
            if entry in fresh and now - since.get(entry, now) > lease_s:
                owner = item["consumer"]
                self._with_group("dating leases", "xclaim", stream, self._group, owner, 0, [entry], idle=0, justid=True)


def _position(entry_id: bytes) -> tuple[int, int]:
    """Return the position of an entry in its stream; b"" is before all."""
    moment, _, number = entry_id.partition(b"-")
    return (int(moment), int(number)) if entry_id else (-1, -1)


def parcels(parts: Iterable[P], most_bytes: int) -> list[list[P]]:
    """Group a script's arguments, a tuple per sample, by calls of at most AT_ONCE samples and ``most_bytes`` bytes."""
    found: list[list[P]] = []
    size = 0
    for part in parts:
        length = sum([len(item) for item in part if type(item) is bytes])
        if not found or len(found[-1]) == AT_ONCE or size + length > most_bytes:
            found.append([])
            size = 0
        found[-1].append(part)
        size += length
    return found


def split_calls(parts: Iterable[tuple[bytes | str | int, ...]]) -> list[list[bytes | str | int]]:
    """Divide a script's arguments, a tuple per sample, into calls as ``parcels`` does; each call is one flat list."""
    return [list(chain.from_iterable(parcel)) for parcel in parcels(parts, BYTES_AT_ONCE)]


def number(text: bytes | None) -> int:
    """Parse a field as a non-negative integer; -1 if it is not a number."""
    return int(text) if text is not None and text.isdigit() else -1


def with_group(connection: Connection, ensure: Callable[[], None], operation: Callable[[], T]) -> T:
    """Run an operation that needs consumer groups; create them again if they are gone, until the deadline."""
    end = time.monotonic() + connection.deadline_s
    while True:
        try:
            return operation()
        except redis.ResponseError as error:
            if error_code(error) not in GONE:
                raise
            if time.monotonic() > end:
                raise InfraError(f"consumer groups are deleted as fast as they are created: {error}") from error
        ensure()


def groups_of(client: redis.Redis, stream: str) -> list[dict[str, Any]]:
    """Return XINFO GROUPS of a stream; [] if the stream is gone."""
    try:
        groups: Any = client.xinfo_groups(stream)
    except redis.ResponseError as error:
        if "no such key" not in str(error):
            raise
        return []
    return list(groups)


def ensure_group(connection: Connection, stream: str, group: str) -> None:
    """Create a stream and its group, which reads from the first entry, unless they exist."""

    def create(client: redis.Redis) -> None:
        # Checked first: if memory is full, creating a group is refused even if it exists.
        if any(info["name"] == group.encode() for info in groups_of(client, stream)):
            return
        try:
            client.xgroup_create(stream, group, id="0", mkstream=True)
        except redis.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    connection.run(f"creating group {group}", create)
