"""Entries of streams: those in a reply, and pages for users, from the oldest entry on or from the newest back."""

from typing import Any

from broker.connection.connection import Connection

KEEP_LINES = 10_000
"""Entries that streams of telemetry keep."""

Entry = tuple[bytes, dict[bytes, bytes]]


def entries_in(reply: Any) -> list[tuple[bytes, Entry]]:
    """Return the entries in the reply of XREAD or XREADGROUP, each with its stream; RESP3 nests them otherwise."""
    streams = reply.items() if isinstance(reply, dict) else reply or []
    return [
        (stream, entry)
        for stream, entries in streams
        for entry in (entries[0] if entries and isinstance(entries[0], list) else entries)
    ]


def read_page(
    connection: Connection, key: str, what: str, limit: int, cursor: str | None = None, newest: bool = False
) -> tuple[list[Entry], str | None]:
    """Return ``limit`` entries after the one with the id ``cursor``, and the cursor of the following page, if any.

    newest: from the newest back. what: what is read, for errors.
    """
    start = f"({cursor}" if cursor is not None else None
    name, ends = ("xrevrange", (start or "+", "-")) if newest else ("xrange", (start or "-", "+"))
    found: list[Entry] = connection.run_command(f"reading {what}", name, key, *ends, limit + 1)
    shown = found[:limit]
    return shown, shown[-1][0].decode() if len(found) > limit else None
