"""Publication of a weight version by the trainer: whole or as a delta, put, announced, and older versions trimmed.

A version number always belongs to one set of weights: the stream refuses it a second time.
"""

from dataclasses import dataclass
from pathlib import Path

import structlog

from broker.connection.connection import Connection
from broker.flow.fencing import run_fenced, term_number
from broker.weights.delta_writer import DeltaWriter
from broker.weights.store import MANIFEST_BYTES, WeightStore
from broker.weights.transports import Transport
from broker.weights.versions import clear_leftovers, count_deltas, find_route, split
from schemas.codec import encode
from schemas.digests import chunk_digests, state_digest
from schemas.errors import FencedError
from schemas.messages import Adapter, Delta, Manifest, Payload, Probe, TensorSpec

log = structlog.get_logger()


@dataclass(eq=False)
class WeightPublication:
    """Publishes the versions of one trainer through ``transport``.

    keep: how many of the newest versions stay. deltas: makes each version a delta if that is possible and pays.
    """

    connection: Connection
    store: WeightStore
    transport: Transport
    keep: int
    deltas: DeltaWriter | None = None

    def __post_init__(self) -> None:
        self._restored = -1
        """The last version that was put back: its whole state is there, but maybe not what leads to it."""
        self._cleared = ""
        """The leader term that has deleted the leftovers of those before it."""

    def publish(
        self,
        file: Path,
        *,
        version: int,
        step: int,
        leader_term: str,
        tensors: list[TensorSpec],
        probe: Probe | None,
        adapter: Adapter | None = None,
    ) -> None:
        """Publish the safetensors ``file``, which is consumed, as version ``version``. Idempotent.

        If the version is published but its bytes are gone, they are put back. FencedError once another trainer has
        taken over, or if it published that version.

        leader_term: the trainer's own. adapter: what the file holds, if it is not a whole model.
        """
        published = self.store.published()
        if leader_term != self._cleared:
            clear_leftovers(file.parent, term_number(leader_term), published)
            self._cleared = leader_term
        newest = published[-1] if published else None
        if newest is not None and newest.version >= version:
            self._put_back(file, newest, version, leader_term)
            return
        state = Payload(self.transport.uri(version, leader_term), file.stat().st_size, chunk_digests(file))
        whole, delta = self._put(file, state, tensors, published, version, leader_term)
        self._announce(
            Manifest(
                version=version,
                step=step,
                leader_term=term_number(leader_term),
                state=state,
                whole=whole,
                delta=delta,
                tensors=tensors,
                probe=probe,
                adapter=adapter,
            ),
            leader_term,
        )
        if self.deltas is not None:
            self.deltas.confirm_base(state.chunks)
        self._trim()

    def _put_back(self, file: Path, newest: Manifest, version: int, leader_term: str) -> None:
        """Put back the bytes of a published version if they are gone; ``newest`` is this version or a later one."""
        if newest.version > version or self.store.holds(newest):
            self._check_own(version, leader_term)
            file.unlink()
        elif chunk_digests(file) == newest.state.chunks:
            self.store.transport_of(newest.state.uri).put(file, newest.state.uri, leader_term)
            self._restored = version
        else:
            file.unlink()
            log.warning("a weight version is lost: its replay has other bits; the next one follows", version=version)

    def _put(
        self,
        file: Path,
        state: Payload,
        tensors: list[TensorSpec],
        published: list[Manifest],
        version: int,
        leader_term: str,
    ) -> tuple[bool, Delta | None]:
        """Put the bytes where readers find them; return whether the whole state is among them, and the delta."""
        whole, delta = True, None
        if self.deltas is not None:
            made = self.deltas.make_delta(file, tensors, published, leader_term)
            # The chain stays short, and a version that a new reader can't reach is no base.
            full = count_deltas(published) >= self.deltas.max_chain
            whole = made is None or full or not self._reachable(made[1], published)
            self.deltas.keep_base(file)
            delta = self._put_delta(*made, version, leader_term) if made else None
        if whole:
            self.transport.put(file, state.uri, leader_term)
        else:
            file.unlink()
        return whole, delta

    def _put_delta(self, file: Path, base: Manifest, version: int, leader_term: str) -> Delta:
        uri = self.transport.uri(version, leader_term, "delta")
        payload = Payload(uri, file.stat().st_size, chunk_digests(file))
        self.transport.put(file, uri, leader_term)
        return Delta(base.version, state_digest(base.state.chunks), payload)

    def _reachable(self, manifest: Manifest, published: list[Manifest]) -> bool:
        """Return whether a later version may build on this one."""
        route = find_route(published, manifest)
        return manifest.version != self._restored and route is not None and self.store.has(*route.payloads)

    def _announce(self, manifest: Manifest, leader_term: str) -> None:
        payload = manifest.delta.payload if manifest.delta else manifest.state
        with self.transport.spreading(payload, leader_term):
            body = encode(manifest, MANIFEST_BYTES)
            answer = run_fenced(self.connection, "add_version", leader_term, manifest.version, body)
        if answer == b"exists":
            self._check_own(manifest.version, leader_term)

    def _check_own(self, version: int, leader_term: str) -> None:
        newest = self.store.newest()
        if newest is None or newest.leader_term != term_number(leader_term):
            raise FencedError(
                f"weights version {version} was published by another trainer than {leader_term}, which stops"
            )

    def _trim(self) -> None:
        old, kept = split(self.store.published(), self.keep)
        if not kept:
            # The manifests were deleted in this moment: the trainer finds out and publishes again.
            return
        self.transport.trim(old, kept)
        # Manifests go last: bytes without one would stay for ever if the trainer died in between.
        for manifest in old:
            self.connection.run_command(
                "deleting old weights", "xdel", self.connection.keys.weights, f"{manifest.version}-1"
            )
