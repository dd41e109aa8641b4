"""Bodies of finished samples, and of evaluation tasks, which lie beside the stream that carries their names.

A sample's place, ENTRY/BODY, is its entry in the trajectories and the name of its body. Whoever publishes a sample
gives its body a name that nobody else has, so that a second delivery never replaces the first. The body of an
evaluation task has the id of its task.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from typing import Any

from broker.connection.connection import Connection

AT_ONCE = 64
"""Bodies that are read in one round trip."""
NO_BODY = "its body is not there"
"""Reason of a dead letter whose message's body was lost."""


class BodyNames:
    """Names for bodies, different from all that anybody else gives. Thread-safe."""

    def __init__(self) -> None:
        self._writer = secrets.token_hex(8)
        self._count = itertools.count()

    def next_name(self) -> str:
        """Return a new name."""
        return f"{self._writer}.{next(self._count)}"


def read_bodies(connection: Connection, names: Sequence[bytes]) -> list[bytes | None]:
    """Read the bodies of these names; None for one that is not there."""
    bodies: list[bytes | None] = []
    for first in range(0, len(names), AT_ONCE):
        some = names[first : first + AT_ONCE]
        bodies += connection.run(
            "reading trajectories", lambda client, some=some: client.hmget(connection.keys.bodies, some)
        )
    return bodies


def body_name(place: Any) -> bytes:
    """Return the name of the body in a place, b"" where it has none."""
    return bytes(place or b"").partition(b"/")[2]
