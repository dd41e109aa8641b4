"""Streams for users: bounded, and read a page at a time, forwards from the oldest entry or back from the newest."""

from typing import Any

from broker.connection.connection import Connection

KEEP_LINES = 10_000
"""Entries that streams of telemetry keep."""

Entry = tuple[bytes, dict[bytes, bytes]]


def read_page(
    connection: Connection, key: str, what: str, limit: int, cursor: str | None = None, newest: bool = False
) -> tuple[list[Entry], str | None]:
    """Return ``limit`` entries after the one with the id ``cursor``, and the cursor of the following page, if any.

    newest: from the newest back. what: what is read, for errors.
    """
    start = f"({cursor}" if cursor is not None else None

    def read(client: Any) -> Any:
        if newest:
            return client.xrevrange(key, start or "+", "-", limit + 1)
        return client.xrange(key, start or "-", "+", limit + 1)

    found: list[Entry] = connection.run(f"reading {what}", read)
    shown = found[:limit]
    return shown, shown[-1][0].decode() if len(found) > limit else None
