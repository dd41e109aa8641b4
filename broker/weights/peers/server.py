"""The server of a peer: a thread for each connection, which sends chunks with the system's file copy."""

import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable

import numpy as np
import structlog

from broker.weights.peers import wire
from broker.weights.peers.chunk_store import ChunkStore, StoredPayload, bytes_of
from broker.weights.peers.wire import SILENCE_S, Get, Have, Held, PeerError, Sent, questions, receive, send
from schemas.digests import CHUNK_BYTES
from schemas.errors import ConfigError
from schemas.urls import open_listener

MOST_CONNECTIONS = 128
"""Most connections at once; further ones are closed, and their readers ask another peer."""
IDLE_S = 60.0
_LOOK_S = 1.0

log = structlog.get_logger()


class PeerServer:
    """Serves a store at ``host``:``port`` from ``start`` to ``close``; port 0 takes a free one.

    key: returns the run's key, waiting if necessary. tls: with the server's certificate. sent_bytes: sent so far.
    """

    def __init__(
        self, store: ChunkStore, host: str, port: int, key: Callable[[], bytes], tls: ssl.SSLContext | None = None
    ) -> None:
        self._store = store
        self._key = key
        self._tls = tls
        self._places = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._lock = threading.Lock()
        self._streams: set[socket.socket] = set()
        self._stop = threading.Event()
        self.sent_bytes = 0
        try:
            self._listener = open_listener(host, port)
        except OSError as error:
            raise ConfigError(
                f"trainer.publish.peer.port: weights can't be served at {host}:{port}, 0 takes a free port:"
                f" {error.strerror}"
            ) from error
        self._listener.settimeout(_LOOK_S)
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name="peers", daemon=True)

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._streams)

    def start(self) -> None:
        """Begin to accept connections."""
        self._thread.start()

    def close(self) -> None:
        """Cancel all transfers and accept no more connections."""
        self._stop.set()
        with contextlib.suppress(OSError):
            # This wakes the accepting thread, but not on every system.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            # Its thread closes it.
            wire.hang_up(stream)
        if self._thread.ident is not None:
            self._thread.join(2 * _LOOK_S)

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                stream, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self._stop.is_set():
                    return
                log.warning("a peer could not be accepted", error=str(error))
                self._stop.wait(_LOOK_S)
                continue
            if not self._places.acquire(blocking=False):
                stream.close()
                continue
            threading.Thread(target=self._serve, args=(stream,), name="peer", daemon=True).start()

    def _serve(self, stream: socket.socket) -> None:
        with self._lock:
            self._streams.add(stream)
        try:
            stream.settimeout(SILENCE_S)
            if self._tls is not None:
                stream = self._secure(stream, self._tls)
            self._admit(stream)
            while not self._stop.is_set():
                stream.settimeout(IDLE_S)
                question = receive(stream, questions)
                stream.settimeout(SILENCE_S)
                self._answer(stream, question)
        except (OSError, PeerError):
            # The reader is done or gone; otherwise it connects again.
            pass
        finally:
            with self._lock:
                self._streams.discard(stream)
            stream.close()
            self._places.release()

    def _secure(self, stream: socket.socket, tls: ssl.SSLContext) -> socket.socket:
        secured = tls.wrap_socket(stream, server_side=True)
        with self._lock:
            # The wrapped one has taken over the connection.
            self._streams.discard(stream)
            self._streams.add(secured)
        return secured

    def _admit(self, stream: socket.socket) -> None:
        """Authenticate a reader by the run's key; log a failure and raise PeerError."""
        try:
            if not (key := self._key()):
                raise PeerError("the run's key is not known yet")
            wire.admit(stream, key)
        except PeerError as error:
            log.warning("a connection for weights was refused", error=str(error))
            raise

    def _answer(self, stream: socket.socket, question: Have | Get) -> None:
        item = self._store.find(question.name)
        if isinstance(question, Have):
            found = item.chunks(question.reader, question.stalled, time.monotonic()) if item is not None else None
            send(stream, Held(b"" if found is None else np.packbits(found).tobytes()))
            return
        taken = 0
        if item is not None:
            taken = item.take(question.first, question.count, question.reader, question.stalled, time.monotonic())
        if item is None or not taken:
            send(stream, Sent(0, 0))
            return
        arrived = False
        try:
            send(stream, Sent(taken, bytes_of(item.size, question.first, taken)))
            self._send_chunks(stream, item, question.first, taken)
            arrived = True
        finally:
            item.give_back(question.first, taken, arrived)

    def _send_chunks(self, stream: socket.socket, item: StoredPayload, first: int, count: int) -> None:
        for chunk in range(first, first + count):
            if item.closed:
                raise PeerError("the payload is no longer served")
            size = bytes_of(item.size, chunk, 1)
            if isinstance(stream, ssl.SSLSocket):
                # The system's file copy can't encrypt.
                data = os.pread(item.file.fileno(), size, chunk * CHUNK_BYTES)
                stream.sendall(data)
                sent = len(data)
            else:
                sent = stream.sendfile(item.file, chunk * CHUNK_BYTES, size)
            if sent != size:
                raise PeerError("the payload's file is too short")
            with self._lock:
                self.sent_bytes += size
