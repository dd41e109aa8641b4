"""The peers' protocol over TCP: a handshake by the run's key, then requests and replies.

A frame is its length, 4 bytes big-endian, and a MessagePack map. The bytes of chunks follow their reply unframed.
Nothing is signed: readers compare chunks with digests from the broker. If the broker has TLS, so does this protocol
(certificate.py).
"""

import contextlib
import hmac
import secrets
import socket
import struct
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from schemas.errors import InfraError

SILENCE_S = 5.0
"""Seconds without a byte in either direction after which a peer is abandoned."""
_NONCE = 32
_LENGTH = struct.Struct(">I")
_MOST = 1 << 20
"""Most bytes of a frame: the map of a payload of 8 TB."""


class Have(msgspec.Struct, tag="have", frozen=True):
    """Request for the list of chunks of a payload that this reader may get.

    reader: its id. stalled: it has received nothing for a while, so limits don't apply to it.
    """

    name: str
    reader: str
    stalled: bool


class Get(msgspec.Struct, tag="get", frozen=True):
    """Request for ``count`` chunks from chunk ``first`` on."""

    name: str
    reader: str
    stalled: bool
    first: int
    count: int


class Held(msgspec.Struct, tag="held", frozen=True):
    """Reply to ``Have``: a bit for each chunk, from the highest bit of the first byte; empty if there are none."""

    chunks: bytes


class Sent(msgspec.Struct, tag="sent", frozen=True):
    """Reply to ``Get``: ``count`` chunks of ``size`` bytes in all follow; 0 if they are not available now."""

    count: int
    size: int


T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()
questions: msgspec.msgpack.Decoder[Have | Get] = msgspec.msgpack.Decoder(Have | Get)
held: msgspec.msgpack.Decoder[Held] = msgspec.msgpack.Decoder(Held)
sent: msgspec.msgpack.Decoder[Sent] = msgspec.msgpack.Decoder(Sent)


class PeerError(InfraError):
    """A peer is gone, silent, not of this run, or breaks the protocol."""


def send(stream: socket.socket, message: msgspec.Struct) -> None:
    """Send a frame. OSError if the peer is gone."""
    body = _encoder.encode(message)
    stream.sendall(_LENGTH.pack(len(body)) + body)


def receive(stream: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Read a frame. PeerError if it is invalid, OSError if the peer is gone."""
    (length,) = _LENGTH.unpack(receive_exactly(stream, _LENGTH.size))
    if length > _MOST:
        raise PeerError(f"a frame of {length} bytes")
    try:
        return decoder.decode(receive_exactly(stream, length))
    except msgspec.MsgspecError as error:
        raise PeerError(f"not a frame of a peer: {error}") from error


def receive_exactly(stream: socket.socket, size: int) -> bytearray:
    """Read ``size`` bytes. PeerError if the connection ends, OSError if the peer is gone."""
    data = bytearray(size)
    receive_into(stream, memoryview(data))
    return data


def receive_into(stream: socket.socket, view: memoryview) -> None:
    """Fill ``view``. PeerError if the connection ends, OSError if the peer is gone."""
    at = 0
    while at < len(view):
        read = stream.recv_into(view[at:])
        if not read:
            raise PeerError("the connection ended")
        at += read


def connect(
    host: str, port: int, key: bytes, secure: Callable[[socket.socket], socket.socket] | None = None
) -> socket.socket:
    """Connect to a peer of this run. PeerError if it is not one, OSError if it does not answer.

    secure: wraps the connection in TLS.
    """
    stream = socket.create_connection((host, port), SILENCE_S)
    try:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if secure is not None:
            stream = secure(stream)
        theirs, ours = receive_exactly(stream, _NONCE), secrets.token_bytes(_NONCE)
        stream.sendall(ours + _proof(key, b"reader", theirs, ours))
        if not hmac.compare_digest(receive_exactly(stream, _NONCE), _proof(key, b"server", ours, theirs)):
            raise PeerError("it does not know the run's key")
    except BaseException:
        stream.close()
        raise
    return stream


def admit(stream: socket.socket, key: bytes) -> None:
    """Authenticate a connecting peer by the run's key, in both directions. PeerError or OSError if it fails."""
    ours = secrets.token_bytes(_NONCE)
    stream.sendall(ours)
    theirs, proof = receive_exactly(stream, _NONCE), receive_exactly(stream, _NONCE)
    if not hmac.compare_digest(proof, _proof(key, b"reader", ours, theirs)):
        raise PeerError("it does not know the run's key")
    stream.sendall(_proof(key, b"server", theirs, ours))


def hang_up(stream: socket.socket) -> None:
    """Shut down a connection, which also ends another thread's wait for the peer."""
    with contextlib.suppress(OSError):
        # Not ssl's shutdown, which would break a call in another thread.
        socket.socket.shutdown(stream, socket.SHUT_RDWR)


def _proof(key: bytes, side: bytes, challenge: Any, own: Any) -> bytes:
    return hmac.digest(key, side + bytes(challenge) + bytes(own), "sha256")
