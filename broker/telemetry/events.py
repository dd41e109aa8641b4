"""The timeline of a run: a bounded stream of events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from broker.connection.connection import RunData
from broker.connection.stream_pages import KEEP_LINES, Entry, entries_in, read_page
from schemas.codec import encode, try_decode
from schemas.messages import Event

MOST_TEXT = 1500
"""Characters of an event: the reason of an error may quote a whole file."""


class Events(RunData):
    """The timeline of a run."""

    def emit(self, event: Event) -> None:
        """Append an event; a text longer than ``MOST_TEXT`` is cut."""
        if len(event.text) > MOST_TEXT:
            event = msgspec.structs.replace(event, text=f"{event.text[:MOST_TEXT]} …")
        self._connection.run_script("append_telemetry", "events", "b", encode(event), KEEP_LINES)

    def newest(self, count: int) -> list[StoredEvent]:
        """Return the newest ``count`` events with their ids, oldest first."""
        entries = self._connection.run_command("reading events", "xrevrange", self._keys.events, count=count)
        return _stored(reversed(entries))

    def page(self, count: int, cursor: str | None, newest: bool) -> tuple[list[StoredEvent], str | None]:
        """Return a page of events, from the oldest on or from the newest back, and the cursor of the next page."""
        entries, following = read_page(self._connection, self._keys.events, "events", count, cursor, newest)
        return _stored(entries), following

    def read_after(self, id: str, count: int, block_ms: int | None = None) -> list[StoredEvent]:
        """Read up to ``count`` events after ``id``, oldest first; waits up to ``block_ms`` for one if given."""
        reply = self._connection.run_command("following events", "xread", {self._keys.events: id}, count, block_ms)
        return _stored(entry for _, entry in entries_in(reply))


@dataclass(frozen=True)
class StoredEvent:
    """An event with its id in the stream. time: Unix seconds by the broker's clock, from the id."""

    id: str
    time: float
    event: Event


def _stored(entries: Iterable[Entry]) -> list[StoredEvent]:
    """Decode entries of the stream, without those that are not events."""
    events = []
    for entry_id, fields in entries:
        if (event := try_decode(fields.get(b"b", b""), Event)) is not None:
            id = entry_id.decode()
            events.append(StoredEvent(id, int(id.partition("-")[0]) / 1000, event))
    return events
