"""Bodies of finished samples and of evaluation tasks, stored beside the streams, which carry only their names.

A sample's place, ENTRY/BODY, is its entry in the trajectories and the name of its body. Each publisher uses unique
names, so that a second delivery never replaces the first. The body of an evaluation task is named by the task's id.
"""

from collections.abc import Sequence
from typing import Any

from broker.connection.connection import Connection


def read_bodies(connection: Connection, names: Sequence[bytes]) -> list[bytes | None]:
    """Read bodies by name; None for a missing one."""
    return connection.read_fields("reading trajectories", connection.keys.bodies, names)


def body_name(place: Any) -> bytes:
    """Return the name of the body in a place, b"" if it has none."""
    return bytes(place or b"").partition(b"/")[2]
