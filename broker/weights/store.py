"""Published weight versions, newest last. Readers pull; nobody waits for them.

A version number belongs to one set of weights for ever: the stream refuses it a second time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import structlog

from broker.fence import accepted, incarnation
from broker.link import BLOCK_MS, Link
from broker.weights.transports import FileTransport, RedisTransport, Transport, chunk_digests
from schemas.codec import decode, encode
from schemas.errors import FencedError, InfraError
from schemas.messages import Manifest, Probe, TensorSpec

log = structlog.get_logger()


class WeightStore:
    """``publish`` for the trainer; ``newest``, ``wait_newer`` and ``fetch`` for generators."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def publish(
        self,
        transport: Transport,
        file: Path,
        *,
        version: int,
        step: int,
        epoch: str,
        tensors: list[TensorSpec],
        probe: Probe | None,
        keep: int,
    ) -> None:
        """Make the safetensors ``file`` (it is consumed) version ``version``; doing it twice changes nothing.

        Where its manifest is still there and its bytes are gone, they are put back.
        epoch: the trainer's own. FencedError once another one took over, or if another one has published that version.
        """
        newest = self.newest()
        if newest is not None and newest.version >= version:
            if newest.version > version or self.holds(newest):
                self._check_own(version, epoch)
                file.unlink()
            elif chunk_digests(file) == newest.chunks:
                self._of(newest.uri).restore(file, newest, epoch)
            else:
                file.unlink()
                log.warning("a weight version is lost until the next one: a replay made other bits", version=version)
            return
        size, chunks = file.stat().st_size, chunk_digests(file)
        manifest = Manifest(
            version=version,
            step=step,
            epoch=incarnation(epoch),
            uri=transport.put(file, version, epoch),
            size=size,
            chunks=chunks,
            tensors=tensors,
            probe=probe,
        )
        answer = accepted(self._link.script("weights_add", epoch, version, encode(manifest, 1 << 28)), epoch)
        if answer == b"exists":
            self._check_own(version, epoch)
        self._trim(transport, keep)

    def _check_own(self, version: int, epoch: str) -> None:
        newest = self.newest()
        if newest is None or newest.epoch != incarnation(epoch):
            raise FencedError(f"weights version {version} was published by another trainer than {epoch}, which stops")

    def holds(self, manifest: Manifest) -> bool:
        """Whether the bytes of a version are still there; they are not looked at."""
        return self._of(manifest.uri).holds(manifest)

    def _trim(self, transport: Transport, keep: int) -> None:
        keys = self._link.keys
        entries: Any = self._link.run("listing weights", lambda client: client.xrange(keys.weights))
        if not entries:
            # Deleted in this moment: the trainer finds out and publishes again.
            return
        manifests = [decode(fields[b"b"], Manifest, 1 << 28) for _, fields in entries]
        transport.trim(manifests[:-keep], manifests[-keep:])
        # Last: bytes without a manifest would stay for ever if the trainer died in between.
        for entry_id, _ in entries[:-keep]:
            self._link.run(
                "deleting old weights", lambda client, entry_id: client.xdel(keys.weights, entry_id), entry_id
            )

    def newest(self) -> Manifest | None:
        """The newest version, None before the first."""
        found: Any = self._link.run(
            "looking for weights", lambda client: client.xrevrange(self._link.keys.weights, count=1)
        )
        return decode(found[0][1][b"b"], Manifest, 1 << 28) if found else None

    def wait_newer(self, version: int, timeout_ms: int = BLOCK_MS) -> Manifest | None:
        """The newest version above ``version``, as soon as there is one; None after the timeout."""
        self._link.run(
            "waiting for weights",
            lambda client: client.xread(
                {self._link.keys.weights: f"{version}-2" if version >= 0 else "0"}, 1, timeout_ms
            ),
        )
        newest = self.newest()
        return newest if newest is not None and newest.version > version else None

    def fetch(self, manifest: Manifest, folder: Path) -> Path:
        """A verified local safetensors file; InfraError when it is damaged or gone."""
        return self._of(manifest.uri).fetch(manifest, folder)

    def _of(self, uri: str) -> Transport:
        """The transport that a published version came by."""
        kind, _, place = uri.partition(":")
        if kind not in ("file", "redis"):
            raise InfraError(f"weights {uri!r} came by {kind!r}, which this release does not know")
        return make_transport(self._link, kind, Path(place).parent)


def make_transport(link: Link, kind: str, folder: Path) -> Transport:
    """The trainer's end of a transport: ``file`` or ``redis``."""
    return FileTransport(folder) if kind == "file" else RedisTransport(link)
