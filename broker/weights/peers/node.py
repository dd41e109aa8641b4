"""A process's part among the peers: what it holds, the server of that, and its record in the broker."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import redis
import structlog

from broker.connection.connection import Connection
from broker.weights.peers.certificate import make_certificate
from broker.weights.peers.registry import RENEW_S, Peer, PeerRegistry, find_host, is_loopback
from broker.weights.peers.server import PeerServer
from broker.weights.peers.shelf import Item, Shelf
from broker.weights.peers.wire import SILENCE_S
from schemas.config.publish import PeerConfig
from schemas.errors import InfraError, TidemillError

SIGN_OFF_S = 2.0
"""Seconds that the end of a process waits for the broker to hear of it."""

log = structlog.get_logger()


class PeerNode:
    """Serves what is put here, from the first call of ``put`` until ``close``.

    origin: whether it is the trainer's, whose sending ``uplinks`` bounds. id: of this process among the peers.
    """

    def __init__(self, connection: Connection, service: str, settings: PeerConfig, origin: bool = False) -> None:
        self.id = f"{service}-{secrets.token_hex(4)}"
        self.registry = PeerRegistry(connection)
        self.streams = settings.streams
        self._origin = origin
        self._host = settings.host or find_host(connection.url)
        self._shelf = Shelf(settings.uplinks if origin else None)
        everywhere = "::" if ":" in self._host else "0.0.0.0"
        bound = self._host if is_loopback(self._host) else everywhere
        self._key = b""
        self._keyed = threading.Event()
        context, self._fingerprint = make_certificate() if self.registry.tls else (None, "")
        self._server = PeerServer(self._shelf, bound, settings.port, self._wait_key, context)
        self._beginning = threading.Lock()
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._announcing = threading.Lock()
        self._thread = threading.Thread(target=self._renew, name="peer lease", daemon=True)

    @property
    def sent_bytes(self) -> int:
        """Bytes of weights that left this process so far."""
        return self._server.sent_bytes

    @property
    def connections(self) -> int:
        """Connections of readers that are open now."""
        return self._server.connections

    def put(self, name: str, path: Path, size: int, at_once: bool = True) -> None:
        """Serve a whole payload. at_once: who looks for it finds us when this returns, else within a moment.

        InfraError when there is no such file, and with ``at_once`` when there is no broker.
        """
        self._shelf.put(name, path, size)
        if at_once:
            self._announce(once=False)
        self._wake.set()
        self._begin()

    def begin(self, name: str, path: Path, size: int) -> Item:
        """Serve a payload while it comes in, chunk by chunk."""
        item = self._shelf.put(name, path, size, complete=False)
        self._begin()
        self._wake.set()
        return item

    def remove(self, name: str) -> None:
        """Serve a payload no more; its file may be changed then."""
        self._shelf.remove(name)
        self._wake.set()

    def names(self) -> list[str]:
        """Return what is served."""
        return self._shelf.names()

    def close(self) -> None:
        """End, and take the record out of the broker."""
        self._stop.set()
        self._wake.set()
        with self._beginning:
            begun = self._thread.ident is not None
        if begun:
            self._thread.join(RENEW_S)
        self._server.close()
        for name in self._shelf.names():
            self._shelf.remove(name)
        sign_off(self._sign_off)

    def _sign_off(self) -> None:
        with self._announcing:
            self.registry.announce(self._record(), lease_s=0, once=True)

    def _wait_key(self) -> bytes:
        """The run's key: others may find us in the broker before its answer is here."""
        self._keyed.wait(SILENCE_S)
        return self._key

    def _begin(self) -> None:
        with self._beginning:
            if self._thread.ident is None and not self._stop.is_set():
                self._server.start()
                self._thread.start()

    def _record(self) -> Peer:
        return Peer(
            self.id,
            self._host,
            self._server.port,
            socket.gethostname(),
            self._origin,
            self._shelf.names(),
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
                # It comes again by itself; until then those who know us go on.
                log.warning("a peer's lease could not be renewed", error=str(error))
                self._stop.wait(RENEW_S)


def sign_off(tell: Callable[[], None]) -> None:
    """Tell the broker that a process ends, in a thread, and wait at most SIGN_OFF_S: it may hang.

    Whoever is not told finds out by a lease or a deadline.
    """

    def try_it() -> None:
        try:
            tell()
        except (TidemillError, redis.RedisError) as error:
            log.debug("could not sign off", error=str(error))

    thread = threading.Thread(target=try_it, name="sign off", daemon=True)
    thread.start()
    thread.join(SIGN_OFF_S)
