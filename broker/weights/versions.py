"""Published weight versions as a chain: which lead to a version, which are kept, and which files belong to none.

Versions are in the order of publication, oldest first; a delta is always against the version before. A file belongs to
no version if the trainer died while it wrote the file, or before it published the manifest.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from schemas.digests import state_digest
from schemas.messages import Manifest, Payload


@dataclass(frozen=True)
class Route:
    """A way to a version: from the whole ``start`` (None: from the held state) through ``deltas``."""

    start: Manifest | None
    deltas: tuple[Manifest, ...]

    @property
    def size(self) -> int:
        """Bytes to transfer."""
        return (self.start.state.size if self.start else 0) + sum(payload.size for payload in self._differences())

    @property
    def payloads(self) -> list[Payload]:
        """Payloads to fetch."""
        return [*([self.start.state] if self.start else []), *self._differences()]

    def _differences(self) -> list[Payload]:
        return [manifest.delta.payload for manifest in self.deltas if manifest.delta is not None]


def find_route(published: Sequence[Manifest], target: Manifest, held: Manifest | None = None) -> Route | None:
    """Find the way to ``target`` from ``held``, the version whose state the reader has; None if no way leads there.

    Without ``held`` the way begins at the nearest whole version.
    """
    known = {manifest.version: manifest for manifest in published} | {target.version: target}
    deltas: list[Manifest] = []
    at = target
    while True:
        if held is None:
            if at.whole:
                return Route(at, tuple(reversed(deltas)))
        elif (at.version, at.state.chunks) == (held.version, held.state.chunks):
            return Route(None, tuple(reversed(deltas)))
        base = known.get(at.delta.base) if at.delta else None
        if at.delta is None or base is None or base.version >= at.version:
            return None
        if state_digest(base.state.chunks) != at.delta.base_digest:
            return None
        deltas.append(at)
        at = base


def count_deltas(published: Sequence[Manifest]) -> int:
    """Return how many deltas a new reader applies to reach the newest version."""
    return sum(1 for _ in takewhile(lambda manifest: not manifest.whole, reversed(published)))


def split(published: Sequence[Manifest], keep: int) -> tuple[list[Manifest], list[Manifest]]:
    """Return the versions to free, and those to keep: the newest ``keep``, and what the oldest of these builds on."""
    first = max(0, len(published) - keep)
    while first > 0 and not published[first].whole:
        first -= 1
    return list(published[:first]), list(published[first:])


_OWN = re.compile(r"\.?(?:base|next|delta|part-\d+)-t(\d+)(?:\.\d+)?")
_PUBLISHED = re.compile(r"v\d+-t(\d+)\.(?:safetensors|delta)")


def clear_leftovers(folder: Path, leader_term: int, published: Sequence[Manifest]) -> None:
    """Delete the files of earlier leader terms that no manifest names. The folder belongs to one run."""
    named = {manifest.state.uri for manifest in published}
    named |= {manifest.delta.payload.uri for manifest in published if manifest.delta is not None}
    for path in folder.glob("*-t*"):
        found = _OWN.fullmatch(path.name) or _PUBLISHED.fullmatch(path.name)
        if found and int(found[1]) < leader_term and not {f"file:{path}", f"peer:{path.name}"} & named:
            path.unlink(missing_ok=True)
