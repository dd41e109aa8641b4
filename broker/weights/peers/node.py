"""A process as a peer: the chunks that it has, its server, and its record in the broker."""

import secrets
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import redis
import structlog

from broker.connection.connection import Connection
from broker.weights.peers.certificate import make_certificate
from broker.weights.peers.chunk_store import ChunkStore, StoredPayload
from broker.weights.peers.registry import RENEW_S, Peer, PeerRegistry, find_host
from broker.weights.peers.server import PeerServer
from broker.weights.peers.wire import SILENCE_S
from schemas.config.publish import PeerConfig
from schemas.errors import InfraError, TidemillError
from schemas.urls import is_loopback

SIGN_OFF_S = 2.0
"""Seconds that the end of a process waits until the broker has removed its record."""

log = structlog.get_logger()


class PeerNode:
    """Serves payloads from the first ``put`` or ``begin`` until ``close``.

    origin: whether it is the trainer's, whose traffic ``uplinks`` limits. id: of this process among the peers.
    """

    def __init__(self, connection: Connection, service: str, settings: PeerConfig, origin: bool = False) -> None:
        self.id = f"{service}-{secrets.token_hex(4)}"
        self.registry = PeerRegistry(connection)
        self.streams = settings.streams
        self._origin = origin
        self._host = settings.host or find_host(connection.url)
        self._store = ChunkStore(settings.uplinks if origin else None)
        everywhere = "::" if ":" in self._host else "0.0.0.0"
        bound = self._host if is_loopback(self._host) else everywhere
        self._key = b""
        self._keyed = threading.Event()
        context, self._fingerprint = make_certificate() if self.registry.tls else (None, "")
        self.server = PeerServer(self._store, bound, settings.port, self._wait_key, context)
        self._beginning = threading.Lock()
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._announcing = threading.Lock()
        self._thread = threading.Thread(target=self._renew, name="peer lease", daemon=True)

    def put(self, name: str, path: Path, size: int, at_once: bool = True) -> None:
        """Serve a whole payload. at_once: register it before this returns; otherwise a moment later.

        InfraError if there is no such file or, with ``at_once``, no broker.
        """
        self._store.put(name, path, size)
        if at_once:
            self._announce(once=False)
        self._wake.set()
        self._begin()

    def begin(self, name: str, path: Path, size: int) -> StoredPayload:
        """Serve a payload while it is received, chunk by chunk."""
        item = self._store.put(name, path, size, complete=False)
        self._begin()
        self._wake.set()
        return item

    def remove(self, name: str) -> None:
        """Stop serving a payload; its file may be changed afterwards."""
        self._store.remove(name)
        self._wake.set()

    def names(self) -> list[str]:
        """Return the names of the payloads that are served."""
        return self._store.names()

    def close(self) -> None:
        """Stop serving, and remove the record from the broker."""
        self._stop.set()
        self._wake.set()
        with self._beginning:
            begun = self._thread.ident is not None
        if begun:
            self._thread.join(RENEW_S)
        self.server.close()
        for name in self._store.names():
            self._store.remove(name)
        sign_off(self._sign_off)

    def _sign_off(self) -> None:
        with self._announcing:
            self.registry.announce(self._record(), lease_s=0, once=True)

    def _wait_key(self) -> bytes:
        """Return the run's key, waiting for it: readers may find this peer before the broker's reply has arrived."""
        self._keyed.wait(SILENCE_S)
        return self._key

    def _begin(self) -> None:
        with self._beginning:
            if self._thread.ident is None and not self._stop.is_set():
                self.server.start()
                self._thread.start()

    def _record(self) -> Peer:
        return Peer(
            self.id,
            self._host,
            self.server.port,
            socket.gethostname(),
            self._origin,
            self._store.names(),
            self._fingerprint,
        )

    def _announce(self, once: bool) -> None:
        with self._announcing:
            if not self._stop.is_set():
                self._key = self.registry.announce(self._record(), once=once)
                self._keyed.set()

    def _renew(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(RENEW_S)
            self._wake.clear()
            try:
                self._announce(once=True)
            except InfraError as error:
                # It is retried soon; readers that know this peer continue meanwhile.
                log.warning("a peer's lease could not be renewed", error=str(error))
                self._stop.wait(RENEW_S)


def sign_off(tell: Callable[[], None]) -> None:
    """Tell the broker in a thread that a process ends, and wait at most SIGN_OFF_S, because it may hang.

    If that fails, others find out by a lease or a deadline.
    """

    def try_it() -> None:
        try:
            tell()
        except (TidemillError, redis.RedisError) as error:
            log.debug("could not sign off", error=str(error))

    thread = threading.Thread(target=try_it, name="sign off", daemon=True)
    thread.start()
    thread.join(SIGN_OFF_S)
