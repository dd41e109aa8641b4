"""Transports: how the bytes of a weight version get from the trainer to its readers."""

from pathlib import Path

from broker.connection.connection import Connection
from broker.weights.transports.base import Form, Receiver, Transport
from broker.weights.transports.broadcast import NcclOrigin, NcclReader
from broker.weights.transports.file import FileTransport
from broker.weights.transports.peer import PeerOrigin, PeerReader
from broker.weights.transports.redis import RedisTransport
from schemas.config.publish import PublishConfig


def make_transport(connection: Connection, kind: str, folder: Path) -> Transport:
    """Return the trainer's transport: ``file`` in this folder, ``redis`` through the broker, ``peer`` or ``nccl``.

    The last two serve the folder with default settings; ``PeerOrigin`` and ``NcclOrigin`` take others.
    """
    if kind == "peer":
        return PeerOrigin(connection, folder, PublishConfig().peer)
    if kind == "nccl":
        return NcclOrigin(connection, folder, PublishConfig())
    return FileTransport(folder) if kind == "file" else RedisTransport(connection)
