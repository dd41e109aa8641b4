"""The payloads that a process serves, and which of their chunks it has.

A payload's file is open for as long as it is in the store, even if its name is deleted meanwhile.
"""

import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt

from schemas.digests import CHUNK_BYTES
from schemas.errors import InfraError

RIVAL_S = 2.0
"""Seconds for which a reader that asked counts as one that can serve others."""
CLOSE_S = 1.0
"""How long ``ChunkStore.remove`` waits for chunks on their way to a reader."""

Chunks = npt.NDArray[np.bool_]


class StoredPayload:
    """A payload of ``size`` bytes in a file: the chunks that are there, and how often each was sent.

    uplinks: how often a chunk is sent while other readers can serve it; None for no limit.
    """

    def __init__(self, path: Path, size: int, complete: bool, uplinks: int | None = None) -> None:
        self.size = size
        self.count = -(-size // CHUNK_BYTES)
        self.file = path.open("rb" if complete else "r+b", buffering=0)
        self._held: Chunks = np.full(self.count, complete)
        self._given = np.zeros(self.count, np.uint32)
        self._uplinks = uplinks
        self._readers: dict[str, float] = {}
        self._changed = threading.Condition()
        self._sending = 0
        self.closed = False
        """Whether the file may change now, so that nothing of it may be sent."""

    def add(self, chunk: int) -> None:
        """Record that a chunk is there."""
        with self._changed:
            self._held[chunk] = True

    def chunks(self, reader: str, stalled: bool, now: float) -> Chunks:
        """Return the chunks that this reader may have, bool [chunks].

        With ``uplinks``, these are the chunks that were sent least often, so that readers get different ones, and none
        that reached the limit. A reader that is alone, or that no other peer serves (``stalled``), may have all.
        """
        with self._changed:
            return self._offered(reader, stalled, now).copy()

    def _offered(self, reader: str, stalled: bool, now: float) -> Chunks:
        self._readers[reader] = now
        self._readers = {name: asked for name, asked in self._readers.items() if now - asked < RIVAL_S}
        if self._uplinks is None or stalled or len(self._readers) < 2:
            return self._held
        least = int(self._given.min(initial=self._uplinks))
        if least >= self._uplinks:
            return np.zeros(self.count, bool)
        offered: Chunks = self._held & (self._given == least)
        return offered

    def take(self, first: int, count: int, reader: str, stalled: bool, now: float) -> int:
        """Reserve chunks from ``first`` on; return how many the reader gets. ``give_back`` must follow."""
        with self._changed:
            if self.closed or not 0 <= first < self.count:
                return 0
            offered = self._offered(reader, stalled, now)[first : first + count]
            missing = np.flatnonzero(~offered)
            taken = int(missing[0]) if missing.size else len(offered)
            self._given[first : first + taken] += 1
            self._sending += bool(taken)
            return taken

    def give_back(self, first: int, count: int, arrived: bool) -> None:
        """End what ``take`` began; chunks that did not arrive do not count as sent."""
        with self._changed:
            self._sending -= 1
            if not arrived:
                self._given[first : first + count] -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Stop serving; return when nothing is being sent, or after CLOSE_S."""
        with self._changed:
            self.closed = True
            quiet = self._changed.wait_for(lambda: not self._sending, CLOSE_S)
        if quiet:
            self.file.close()


def bytes_of(size: int, first: int, count: int) -> int:
    """Return how many bytes of a payload of ``size`` bytes lie in ``count`` chunks, beginning with number ``first``."""
    return max(0, min((first + count) * CHUNK_BYTES, size) - first * CHUNK_BYTES)


class ChunkStore:
    """Payloads by name."""

    def __init__(self, uplinks: int | None = None) -> None:
        self._uplinks = uplinks
        self._items: dict[str, StoredPayload] = {}
        self._lock = threading.Lock()

    def put(self, name: str, path: Path, size: int, complete: bool = True) -> StoredPayload:
        """Serve a payload from a file, or with ``complete`` False the chunks that are added. InfraError: no file."""
        try:
            item = StoredPayload(path, size, complete, self._uplinks)
        except OSError as error:
            raise InfraError(f"{path} cannot be read: {error}") from error
        with self._lock:
            before, self._items[name] = self._items.get(name), item
        if before is not None:
            before.close()
        return item

    def find(self, name: str) -> StoredPayload | None:
        """Return a payload, None if it is not there."""
        with self._lock:
            return self._items.get(name)

    def remove(self, name: str) -> None:
        """Stop serving a payload; its file may be changed afterwards."""
        with self._lock:
            item = self._items.pop(name, None)
        if item is not None:
            item.close()

    def names(self) -> list[str]:
        """Return the names of the payloads, the oldest first."""
        with self._lock:
            return list(self._items)
