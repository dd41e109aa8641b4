"""What peers say to one another over TCP: a handshake by the run's key, then requests and answers.

A frame is its length, 4 bytes big-endian, and a MessagePack map. The bytes of chunks follow their answer as they are.
Nothing is signed: readers compare chunks with digests that come from the broker. Where the broker has TLS, all of it is
under TLS (certificate.py).
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from schemas.errors import InfraError

SILENCE_S = 5.0
"""A peer that neither takes nor sends a byte for so long is given up."""
_NONCE = 32
_LENGTH = struct.Struct(">I")
_MOST = 1 << 20
"""Bytes of a frame: the map of a payload of 8 TB."""


class Have(msgspec.Struct, tag="have", frozen=True):
    """Question which chunks of a payload this reader may get.

    reader: its id. stalled: nobody has given it anything for a while, so that it has to be given what there is.
    """

    name: str
    reader: str
    stalled: bool


class Get(msgspec.Struct, tag="get", frozen=True):
    """Question for ``count`` chunks from chunk ``first`` on."""

    name: str
    reader: str
    stalled: bool
    first: int
    count: int


class Held(msgspec.Struct, tag="held", frozen=True):
    """Answer to ``Have``: a bit for each chunk, the first the highest of the first byte; empty if there is none."""

    chunks: bytes


class Sent(msgspec.Struct, tag="sent", frozen=True):
    """Answer to ``Get``: so many chunks, of ``size`` bytes together, follow; 0 if they can't be had here now."""

    count: int
    size: int


Question = Have | Get
T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()
questions: msgspec.msgpack.Decoder[Have | Get] = msgspec.msgpack.Decoder(Have | Get)
held: msgspec.msgpack.Decoder[Held] = msgspec.msgpack.Decoder(Held)
sent: msgspec.msgpack.Decoder[Sent] = msgspec.msgpack.Decoder(Sent)


class PeerError(InfraError):
    """A peer is gone, silent, no peer of this run, or says what makes no sense."""


def send(stream: socket.socket, message: msgspec.Struct) -> None:
    """Send one frame. OSError when the peer is gone."""
    body = _encoder.encode(message)
    stream.sendall(_LENGTH.pack(len(body)) + body)


def receive(stream: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Read one frame. PeerError for anything else, OSError when the peer is gone."""
    (length,) = _LENGTH.unpack(receive_exactly(stream, _LENGTH.size))
    if length > _MOST:
        raise PeerError(f"a frame of {length} bytes")
    try:
        return decoder.decode(receive_exactly(stream, length))
    except msgspec.MsgspecError as error:
        raise PeerError(f"no frame of a peer: {error}") from error


def receive_exactly(stream: socket.socket, size: int) -> bytearray:
    """Read ``size`` bytes. PeerError if they end before, OSError when the peer is gone."""
    data = bytearray(size)
    receive_into(stream, memoryview(data))
    return data


def receive_into(stream: socket.socket, view: memoryview) -> None:
    """Fill ``view``. PeerError if the bytes end before, OSError when the peer is gone."""
    at = 0
    while at < len(view):
        read = stream.recv_into(view[at:])
        if not read:
            raise PeerError("the connection ended")
        at += read


def connect(
    host: str, port: int, key: bytes, secure: Callable[[socket.socket], socket.socket] | None = None
) -> socket.socket:
    """Return a connection to a peer of this run. PeerError when it is none, OSError when nobody answers.

    secure: makes it one of TLS.
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
    """Let in who knows the run's key, and prove that we do. PeerError for anybody else, OSError when it is gone."""
    ours = secrets.token_bytes(_NONCE)
    stream.sendall(ours)
    theirs, proof = receive_exactly(stream, _NONCE), receive_exactly(stream, _NONCE)
    if not hmac.compare_digest(proof, _proof(key, b"reader", ours, theirs)):
        raise PeerError("it does not know the run's key")
    stream.sendall(_proof(key, b"server", theirs, ours))


def _proof(key: bytes, side: bytes, challenge: Any, own: Any) -> bytes:
    return hmac.digest(key, side + bytes(challenge) + bytes(own), "sha256")
