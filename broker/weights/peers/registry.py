"""The peers of a run: their records in the broker, each under a lease that its process renews."""

import secrets
import socket
from urllib.parse import urlsplit

import msgspec
import structlog

from broker.connection.connection import Connection
from broker.weights.peers.certificate import has_tls
from schemas.errors import ConfigError

LEASE_S = 10
RENEW_S = 3.0

log = structlog.get_logger()


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """A process that serves weights.

    names: payloads of which it has at least a part. origin: whether it is the trainer. machine: its host name.
    fingerprint: of its certificate, "" without TLS.
    """

    id: str
    host: str
    port: int
    machine: str
    origin: bool
    names: list[str]
    fingerprint: str = ""


_decoder = msgspec.msgpack.Decoder(Peer)


class PeerRegistry:
    """The peers of the connection's run. tls: whether they speak TLS, as the broker does."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.tls = has_tls(connection.url)

    def announce(self, peer: Peer, lease_s: int = LEASE_S, once: bool = False) -> bytes:
        """Register a peer for ``lease_s`` seconds, 0 to remove it; return the run's key. once: without retries."""
        args = peer.id, msgspec.msgpack.encode(peer), lease_s, secrets.token_hex(32)
        return bytes(self._connection.run_script("announce_peer", *args, once=once))

    def find(self, once: bool = False) -> tuple[bytes, list[Peer]]:
        """Return the run's key and all peers with a current lease. Unreadable records are of other releases."""
        key, *records = self._connection.run_script("find_peers", once=once)
        peers = []
        for record in records:
            try:
                peers.append(_decoder.decode(record))
            except msgspec.MsgspecError as error:
                log.warning("a peer's record can't be read", error=str(error))
        return bytes(key), peers


def find_host(url: str) -> str:
    """Return this machine's address on the route to the broker; 127.0.0.1 if the broker is on this machine."""
    if url.startswith("unix:"):
        return "127.0.0.1"
    parts = urlsplit(url)
    try:
        family, *_, address = socket.getaddrinfo(parts.hostname, parts.port or 6379, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Nothing is sent: the system only chooses the route.
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"this machine's address can't be found on the way to the broker: {error}; set trainer.publish.peer.host"
        ) from error
