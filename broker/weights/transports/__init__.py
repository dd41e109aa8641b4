"""Ways for the bytes of a weight version to get from the trainer to its readers."""

from __future__ import annotations

from pathlib import Path

from broker.connection.connection import Connection
from broker.weights.transports.base import Form, Location, Receiver, Sender, Transport
from broker.weights.transports.file import FileTransport
from broker.weights.transports.redis import RedisTransport

__all__ = [
    "FileTransport",
    "Form",
    "Location",
    "Receiver",
    "RedisTransport",
    "Sender",
    "Transport",
    "make_transport",
]


def make_transport(connection: Connection, kind: str, folder: Path) -> Transport:
    """The transport ``file`` over this folder, or ``redis`` through the broker."""
    return FileTransport(folder) if kind == "file" else RedisTransport(connection)
