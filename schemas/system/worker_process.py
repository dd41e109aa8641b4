"""A worker process with a socket to the process that started it, and the messages that the two exchange.

A message is its length, 4 bytes little-endian, and MessagePack. A message of length 0 has no body.
"""

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from schemas.system.guarded_process import GuardedProcess

T = TypeVar("T")
_PREFIX = struct.Struct("<I")


class BadReply(Exception):
    """The connection holds something other than the expected message."""


class WorkerProcess(GuardedProcess):
    """A guarded program whose stdin is one end of a socket pair, and ``connection`` the other.

    What the program prints goes to this process's stderr.
    """

    def __init__(
        self, program: Sequence[str], name: str, environment: Mapping[str, str], folder: Path | None = None
    ) -> None:
        """Start it; OSError if the system can't."""
        with contextlib.ExitStack() as unused:
            self.connection, theirs = map(unused.enter_context, socket.socketpair())
            super().__init__(program, name, environment, stdin=theirs.fileno(), stdout=2, folder=folder)
            theirs.close()
            unused.pop_all()

    def ask(self, line: bytes, timeout_s: float) -> bytes:
        """Send a line and return the line that answers it. TimeoutError after ``timeout_s``, OSError at the end."""
        deadline, reply = time.monotonic() + timeout_s, bytearray()
        self.connection.settimeout(timeout_s)
        self.connection.sendall(line + b"\n")
        while not reply.endswith(b"\n"):
            self.connection.settimeout(max(1e-6, deadline - time.monotonic()))
            if not (part := self.connection.recv(1 << 16)):
                raise ConnectionResetError("it closed its output")
            reply += part
        return bytes(reply)

    def kill(self) -> str:
        """Kill the program with everything below it, then close the connection; returns how the program ended."""
        with self.connection:
            return super().kill()


class WorkerChannel:
    """A worker's end of the connection, for one thread."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._received = bytearray()
        self._own = os.getpid()

    def receive(self, decoder: msgspec.msgpack.Decoder[T], timeout_s: float | None = None) -> T | None:
        """Return the next message, or None at the end of the connection. TimeoutError if none arrives in time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if len(self._received) >= _PREFIX.size:
                end = _PREFIX.size + _PREFIX.unpack_from(self._received)[0]
                if len(self._received) >= end:
                    message = decoder.decode(self._received[_PREFIX.size : end])
                    del self._received[:end]
                    return message
            # A timeout of 0 would make the socket non-blocking, whose error is a different one.
            self.connection.settimeout(None if deadline is None else max(1e-6, deadline - time.monotonic()))
            part = self.connection.recv(1 << 20)
            if not part:
                return None
            self._received += part

    def send(self, message: Any) -> None:
        """Send a message. A fork of the worker ends here instead: user code made it, and it has no call to answer."""
        if os.getpid() != self._own:
            os._exit(1)
        self.connection.settimeout(None)
        self.connection.sendall(frame(message))


def frame(message: Any) -> bytes:
    """Return a message with its length before it, or only the length 0 of None."""
    body = b"" if message is None else msgspec.msgpack.encode(message)
    return _PREFIX.pack(len(body)) + body


async def read_message(
    reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[T], most_bytes: int | None = None
) -> T | None:
    """Read a message, None for one without a body.

    BadReply if it can't be decoded or exceeds ``most_bytes``; IncompleteReadError or OSError at the connection's end.
    """
    (size,) = _PREFIX.unpack(await reader.readexactly(_PREFIX.size))
    if most_bytes is not None and size > most_bytes:
        raise BadReply
    data = await reader.readexactly(size)
    try:
        return decoder.decode(data) if data else None
    except msgspec.MsgspecError:
        raise BadReply from None
