"""Bodies of finished samples and of evaluation tasks, stored beside the streams, which carry only their names.

A sample's place, ENTRY/BODY, is its entry in the trajectories and the name of its body. Each publisher uses unique
names, so that a second delivery never replaces the first. The body of an evaluation task is named by the task's id.
"""

import itertools
import secrets
from collections.abc import Sequence
from typing import Any

from broker.connection.connection import Connection

AT_ONCE = 64
"""Bodies read in one round trip."""
NO_BODY = "its body is not there"
"""Reason of a dead letter for a message whose body was lost."""


class BodyNames:
    """Generator of unique names for bodies. Thread-safe."""

    def __init__(self) -> None:
        self._writer = secrets.token_hex(8)
        self._count = itertools.count()

    def next_name(self) -> str:
        """Return a new name."""
        return f"{self._writer}.{next(self._count)}"


def read_bodies(connection: Connection, names: Sequence[bytes]) -> list[bytes | None]:
    """Read bodies by name; None for a missing one."""
    bodies: list[bytes | None] = []
    for first in range(0, len(names), AT_ONCE):
        some = names[first : first + AT_ONCE]
        bodies += connection.run(
            "reading trajectories", lambda client, some=some: client.hmget(connection.keys.bodies, some)
        )
    return bodies


def body_name(place: Any) -> bytes:
    """Return the name of the body in a place, b"" if it has none."""
    return bytes(place or b"").partition(b"/")[2]
