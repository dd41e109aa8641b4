"""Published weight versions, newest last. Readers pull; nobody waits for them.

A version number belongs to one set of weights for ever: the stream refuses it a second time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from broker.connection.connection import BLOCK_MS, Connection
from broker.flow.fencing import accepted, term_number
from broker.weights.delta_writer import DeltaWriter
from broker.weights.transports import PeerOrigin, PeerReader, Receiver, Transport, make_transport
from broker.weights.versions import clear_leftovers, find_route, split
from schemas.codec import decode, encode
from schemas.digests import chunk_digests, state_digest
from schemas.errors import FencedError, InfraError
from schemas.messages import Adapter, Delta, Manifest, Payload, Probe, TensorSpec

log = structlog.get_logger()
_MOST = 1 << 28
"""Bytes of a manifest, which names every tensor and chunk."""
_MOST_REASON = 400
"""Characters of a reason to refuse a version."""


@dataclass(frozen=True)
class Refusals:
    """The verdicts of generators on the newest version that any of them spoke of, -1 before the first.

    count: how often one that has no other weights refused it. generators: which ones. last: the newest reason.
    usable: whether any has had it in use.
    """

    version: int
    count: int
    generators: frozenset[str]
    last: str
    usable: bool


class WeightStore:
    """``publish`` for the trainer; ``newest``, ``wait_newer`` and ``published`` for generators, see also copy.py."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._checked = -1
        """The last version whose bytes were looked at and found right."""
        self._restored = -1
        """The last version that was put back: it can be had by itself, and need not have a chain."""
        self._cleared = ""
        """The term that has cleared up after those before it."""
        self._origin: PeerOrigin | None = None
        self._reader: PeerReader | None = None

    def serve(self, peer: PeerOrigin | PeerReader) -> None:
        """Use what this process serves to others from now on: the trainer's, or a reader's."""
        if isinstance(peer, PeerOrigin):
            self._origin = peer
        else:
            self._reader = peer

    def publish(
        self,
        transport: Transport,
        file: Path,
        *,
        version: int,
        step: int,
        leader_term: str,
        tensors: list[TensorSpec],
        probe: Probe | None,
        keep: int,
        deltas: DeltaWriter | None = None,
        digests: list[str] | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        """Make the safetensors ``file`` (it is consumed) version ``version``; doing it twice changes nothing.

        Where its manifest is still there and its bytes are gone, they are put back.
        leader_term: the trainer's own. FencedError once another one took over, or if another one has published that
        version.
        deltas: makes it a delta against the version before, where that is possible and pays.
        digests: of the file's chunks, where they are known. adapter: what the file holds, if not a whole model.
        """
        published = self.published()
        if leader_term != self._cleared:
            clear_leftovers(file.parent, term_number(leader_term), published)
            self._cleared = leader_term
        newest = published[-1] if published else None
        if newest is not None and newest.version >= version:
            self._republish(file, newest, published, version, leader_term)
            return
        state = Payload(transport.uri(version, leader_term), file.stat().st_size, digests or chunk_digests(file))
        made = deltas.make_delta(file, tensors, published, leader_term) if deltas else None
        # What a newcomer cannot reach any more is no base.
        whole = made is None or deltas is None or deltas.needs_whole(published) or not self._chained(made[1], published)
        if deltas is not None:
            deltas.keep_base(file)
        delta = self._put_delta(transport, *made, version, leader_term) if made else None
        if whole:
            transport.put(file, state.uri, leader_term)
        else:
            file.unlink()
        manifest = Manifest(
            version=version,
            step=step,
            leader_term=term_number(leader_term),
            state=state,
            whole=whole,
            delta=delta,
            tensors=tensors,
            probe=probe,
            adapter=adapter,
        )
        with transport.spreading(delta.payload if delta else state, leader_term):
            sent = self._connection.run_script("add_version", leader_term, version, encode(manifest, _MOST))
            answer = accepted(self._connection, sent, leader_term)
        if answer == b"exists":
            self._check_own(version, leader_term)
        if deltas is not None:
            deltas.confirm_base(state.chunks)
        self._trim(transport, keep)

    def _republish(
        self, file: Path, newest: Manifest, published: list[Manifest], version: int, leader_term: str
    ) -> None:
        """A version this new is published; its bytes may not be there any more."""
        if newest.version > version or self.holds(newest):
            self._check_own(version, leader_term)
            file.unlink()
        elif chunk_digests(file) == newest.state.chunks:
            self._transport_of(newest.state.uri).put(file, newest.state.uri, leader_term)
            self._restored = version
        else:
            file.unlink()
            log.warning("a weight version is lost until the next one: a replay made other bits", version=version)

    def _put_delta(self, transport: Transport, file: Path, base: Manifest, version: int, leader_term: str) -> Delta:
        payload = Payload(transport.uri(version, leader_term, "delta"), file.stat().st_size, chunk_digests(file))
        transport.put(file, payload.uri, leader_term)
        return Delta(base.version, state_digest(base.state.chunks), payload)

    def _check_own(self, version: int, leader_term: str) -> None:
        newest = self.newest()
        if newest is None or newest.leader_term != term_number(leader_term):
            raise FencedError(
                f"weights version {version} was published by another trainer than {leader_term}, which stops"
            )

    def holds(self, manifest: Manifest) -> bool:
        """Return whether a newcomer can get all bytes of a version; the first time they are also verified."""
        if self.has(manifest.state):
            payloads = [manifest.state]
        else:
            route = find_route(self.published(), manifest)
            if route is None or not self._have(route.payloads):
                return False
            payloads = route.payloads
        if self._checked == manifest.version:
            return True
        try:
            for payload in payloads:
                self._transport_of(payload.uri).check(payload)
        except InfraError as error:
            log.warning("a published weight version is damaged", version=manifest.version, error=str(error))
            return False
        self._checked = manifest.version
        return True

    def has(self, payload: Payload) -> bool:
        """Return whether the bytes of a payload are there."""
        return self._have([payload])

    def _have(self, payloads: list[Payload]) -> bool:
        return all(
            self._receiver_of(kind).holds([payload for payload in payloads if payload.uri.startswith(kind)])
            for kind in {payload.uri.partition(":")[0] + ":" for payload in payloads}
        )

    def _chained(self, manifest: Manifest, published: list[Manifest]) -> bool:
        """Return whether a later version may build on this one."""
        route = find_route(published, manifest)
        return manifest.version != self._restored and route is not None and self._have(route.payloads)

    def _trim(self, transport: Transport, keep: int) -> None:
        old, kept = split(self.published(), keep)
        if not kept:
            # Deleted in this moment: the trainer finds out and publishes again.
            return
        transport.trim(old, kept)
        # Last: bytes without a manifest would stay for ever if the trainer died in between.
        for manifest in old:
            self._connection.run(
                "deleting old weights",
                lambda client, entry: client.xdel(self._connection.keys.weights, entry),
                f"{manifest.version}-1",
            )

    def published(self) -> list[Manifest]:
        """All versions that are kept, oldest first."""
        entries: Any = self._connection.run(
            "listing weights", lambda client: client.xrange(self._connection.keys.weights)
        )
        return [decode(fields[b"b"], Manifest, _MOST) for _, fields in entries]

    def newest(self) -> Manifest | None:
        """The newest version, None before the first."""
        found: Any = self._connection.run(
            "looking for weights", lambda client: client.xrevrange(self._connection.keys.weights, count=1)
        )
        return decode(found[0][1][b"b"], Manifest, _MOST) if found else None

    def wait_newer(self, version: int, timeout_ms: int = BLOCK_MS) -> Manifest | None:
        """The newest version above ``version``, as soon as there is one; None after the timeout."""
        came = self._connection.run(
            "waiting for weights",
            lambda client: client.xread(
                {self._connection.keys.weights: f"{version}-2" if version >= 0 else "0"}, 1, timeout_ms
            ),
        )
        # Manifests of large models are large: none is read where nothing came.
        newest = self.newest() if came else None
        return newest if newest is not None and newest.version > version else None

    def note_verdict(self, version: int, generator: str, reason: str = "") -> None:
        """Note that a generator has a version in use, or its ``reason`` to refuse it and be left without weights.

        Tried once: losing one harms nothing, and a repeated one would count twice.
        """
        self._connection.run_script_once("note_verdict", version, generator, reason[:_MOST_REASON])

    def read_refusals(self) -> Refusals:
        """What the generators of this attempt of the run said of the newest version."""
        found: Any = self._connection.run(
            "looking for refusals", lambda client: client.hgetall(self._connection.keys.refusals)
        )
        return Refusals(
            version=int(found.get(b"version", -1)),
            count=int(found.get(b"count", 0)),
            generators=frozenset(
                name.removeprefix(b"by:").decode(errors="replace") for name in found if name.startswith(b"by:")
            ),
            last=found.get(b"last", b"").decode(errors="replace"),
            usable=b"usable" in found,
        )

    def fetch(self, payload: Payload, folder: Path) -> Path:
        """A verified local file, in ``folder`` where it does not lie in a shared one; InfraError: damaged or gone."""
        return self._receiver_of(payload.uri).fetch(payload, folder)

    def offer(self, payload: Payload, path: Path) -> None:
        """Let others have a whole state that is held here, if it is of the transport ``peer`` and we serve."""
        if self._reader is not None and payload.uri.startswith("peer:"):
            self._reader.offer(payload, path)

    def withdraw(self) -> None:
        """Let nobody have the whole state that is held here any more: its file is about to change."""
        if self._reader is not None:
            self._reader.withdraw()

    def _transport_of(self, uri: str) -> Transport:
        """The transport that a published version came by."""
        kind, _, place = uri.partition(":")
        if kind == "peer" and self._origin is not None:
            return self._origin
        if kind not in ("file", "redis"):
            raise InfraError(f"weights {uri!r} came by {kind!r}, which this process does not serve or know")
        return make_transport(self._connection, kind, Path(place).parent)

    def _receiver_of(self, uri: str) -> Receiver:
        """What fetches a published version here; where nothing is served, it comes from peers all the same."""
        if uri.startswith("peer:") and self._origin is None:
            self._reader = self._reader or PeerReader(self._connection)
            return self._reader
        return self._transport_of(uri)
