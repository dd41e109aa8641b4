"""Ways for the bytes of a weight version to get from the trainer to its readers."""

from __future__ import annotations

from pathlib import Path

from broker.connection.connection import Connection
from broker.weights.transports.base import Form, Location, Receiver, Sender, Transport
from broker.weights.transports.file import FileTransport
from broker.weights.transports.peer import PeerOrigin, PeerReader
from broker.weights.transports.redis import RedisTransport
from schemas.config.trainer import PeerConfig

__all__ = [
    "FileTransport",
    "Form",
    "Location",
    "PeerOrigin",
    "PeerReader",
    "Receiver",
    "RedisTransport",
    "Sender",
    "Transport",
    "make_transport",
]


def make_transport(connection: Connection, kind: str, folder: Path) -> Transport:
    """The trainer's transport: ``file`` over this folder, ``redis`` through the broker, or ``peer``, which serves it.

    Settings of ``peer`` are the default ones; ``PeerOrigin`` takes others.
    """
    if kind == "peer":
        return PeerOrigin(connection, folder, PeerConfig())
    return FileTransport(folder) if kind == "file" else RedisTransport(connection)
