"""Published weight versions, as their readers see them: manifests in a stream, oldest first, and their bytes."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog

from broker.connection.connection import BLOCK_MS, Connection, RunData
from broker.weights.peers.node import PeerNode
from broker.weights.transports import NcclReader, PeerOrigin, PeerReader, Receiver, Transport, make_transport
from broker.weights.versions import find_route
from schemas.codec import decode
from schemas.config.publish import PublishConfig
from schemas.errors import InfraError
from schemas.messages import Manifest, Payload

log = structlog.get_logger()
MANIFEST_BYTES = 1 << 28
"""Most bytes of a manifest, which names every tensor and chunk."""
REASON_LENGTH = 400
"""Most characters of a reason to reject a version."""


@dataclass(frozen=True)
class VersionRejections:
    """The verdicts of generators on the newest version that has any, -1 before the first.

    count: how often a generator without other weights rejected it. generators: their names. last: the newest reason.
    usable: whether any generator has used it.
    """

    version: int
    count: int
    generators: frozenset[str]
    last: str
    usable: bool


class WeightStore(RunData):
    """Reads the versions of a run; ``publication.py`` writes them, ``local_copy.py`` keeps a generator's copy."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._verified = -1
        """The last version whose bytes were compared with their digests."""
        self._origin: PeerOrigin | None = None
        self._reader: PeerReader | None = None

    def serve(self, peer: PeerOrigin | PeerReader) -> None:
        """Set what this process serves to its peers: the trainer's versions, or those that a reader received."""
        if isinstance(peer, PeerOrigin):
            self._origin = peer
        else:
            self._reader = peer

    def holds(self, manifest: Manifest) -> bool:
        """Return whether a new reader can get all bytes of a version; the first time, verify them too."""
        if self.has(manifest.state):
            payloads = [manifest.state]
        else:
            route = find_route(self.published(), manifest)
            if route is None or not self.has(*route.payloads):
                return False
            payloads = route.payloads
        if self._verified == manifest.version:
            return True
        try:
            for payload in payloads:
                self.transport_of(payload.uri).check(payload)
        except InfraError as error:
            log.warning("a published weight version is damaged", version=manifest.version, error=str(error))
            return False
        self._verified = manifest.version
        return True

    def has(self, *payloads: Payload) -> bool:
        """Return whether all bytes of these payloads are there."""
        return all(
            self._receiver_of(kind).holds([payload for payload in payloads if payload.uri.startswith(kind)])
            for kind in {payload.uri.partition(":")[0] + ":" for payload in payloads}
        )

    def published(self) -> list[Manifest]:
        """List the versions that are kept, oldest first."""
        entries = self._connection.run_command("listing weights", "xrange", self._keys.weights)
        return [decode(fields[b"b"], Manifest, MANIFEST_BYTES) for _, fields in entries]

    def newest(self) -> Manifest | None:
        """Return the newest version, None before the first."""
        found = self._connection.run_command("looking for weights", "xrevrange", self._keys.weights, count=1)
        return decode(found[0][1][b"b"], Manifest, MANIFEST_BYTES) if found else None

    def wait_newer(self, version: int, timeout_ms: int = BLOCK_MS) -> Manifest | None:
        """Wait for a version above ``version`` and return the newest; None after the timeout."""
        position = {self._keys.weights: f"{version}-2" if version >= 0 else "0"}
        came = self._connection.run_command("waiting for weights", "xread", position, 1, timeout_ms)
        # Manifests of large models are large, so none is read before there is a new one.
        newest = self.newest() if came else None
        return newest if newest is not None and newest.version > version else None

    def note_verdict(self, version: int, generator: str, reason: str = "") -> None:
        """Record that a generator uses a version, or its ``reason`` to reject it if that leaves it without weights.

        Tried once: a lost verdict harms nothing, and a repeated one would count twice.
        """
        self._connection.run_script("note_verdict", version, generator, reason[:REASON_LENGTH], once=True)

    def read_rejections(self) -> VersionRejections:
        """Read the verdicts of generators on the newest version, since the run was last started."""
        found = self._connection.run_command("looking for rejections", "hgetall", self._keys.rejections)
        return VersionRejections(
            version=int(found.get(b"version", -1)),
            count=int(found.get(b"count", 0)),
            generators=frozenset(
                name.removeprefix(b"by:").decode(errors="replace") for name in found if name.startswith(b"by:")
            ),
            last=found.get(b"last", b"").decode(errors="replace"),
            usable=b"usable" in found,
        )

    def fetch(self, payload: Payload, folder: Path) -> Path:
        """Return a verified local file, in ``folder`` unless it lies in a shared one; InfraError: damaged or gone."""
        return self._receiver_of(payload.uri).fetch(payload, folder)

    def offer(self, payload: Payload, path: Path) -> None:
        """Serve a whole state that is held here to peers, if this process serves any."""
        if self._reader is not None and payload.uri.startswith("peer:"):
            self._reader.offer(payload, path)

    def withdraw(self) -> None:
        """Stop serving the whole state that is held here: its file is about to change."""
        if self._reader is not None:
            self._reader.withdraw()

    def transport_of(self, uri: str) -> Transport:
        """Return the transport by which a version was published; InfraError if this process does not have it."""
        kind, _, place = uri.partition(":")
        if kind == "peer" and self._origin is not None:
            return self._origin
        if kind not in ("file", "redis"):
            raise InfraError(f"weights {uri!r} came by {kind!r}, which this process does not serve or know")
        return make_transport(self._connection, kind, Path(place).parent)

    def _receiver_of(self, uri: str) -> Receiver:
        """Return what fetches a published version here; a process that serves nothing also fetches from peers."""
        if uri.startswith("peer:") and self._origin is None:
            self._reader = self._reader or PeerReader(self._connection)
            return self._reader
        return self.transport_of(uri)


@contextlib.contextmanager
def serve_to_peers(connection: Connection, weights: WeightStore, name: str, settings: PublishConfig) -> Iterator[None]:
    """Serve the versions that ``weights`` fetches to other generators, if ``settings.transport`` is peer or nccl.

    Raises ConfigError if this machine can't serve.
    """
    if not settings.from_peers:
        yield
        return
    node = PeerNode(connection, name, settings.peer)
    nccl = settings.transport == "nccl"
    reader = NcclReader(connection, node, settings) if nccl else PeerReader(connection, node)
    with contextlib.closing(reader):
        if isinstance(reader, NcclReader):
            reader.process.check()
        weights.serve(reader)
        yield
