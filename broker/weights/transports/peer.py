"""Weights from peers: the trainer serves its files, and each generator serves what it has fetched."""

import re
from collections.abc import Sequence
from pathlib import Path

from broker.connection.connection import Connection
from broker.weights.peers.download import Download
from broker.weights.peers.node import PeerNode
from broker.weights.peers.registry import PeerRegistry
from broker.weights.transports.base import Form
from broker.weights.transports.file import FileTransport, filling, payloads_of, version_file
from schemas.config.publish import PeerConfig
from schemas.errors import InfraError
from schemas.messages import Manifest, Payload

KEPT_DELTAS = 2
"""Deltas that a reader still serves after it applied them, for readers that are a version behind."""

_NAME = re.compile(r"v\d+-t\d+\.(?:safetensors|delta)")


class PeerOrigin(FileTransport):
    """The trainer's side: versions are files in its folder, which need not be shared.

    Files that an earlier trainer left there are served again.
    """

    def __init__(self, connection: Connection, folder: Path, settings: PeerConfig) -> None:
        super().__init__(folder)
        self.node = PeerNode(connection, "trainer", settings, origin=True)
        if folder.is_dir():
            for path in sorted(folder.iterdir()):
                if _NAME.fullmatch(path.name):
                    self.node.put(path.name, path, path.stat().st_size, at_once=False)

    def uri(self, version: int, leader_term: str, form: Form = "whole") -> str:
        return f"peer:{version_file(version, leader_term, form)}"

    def put(self, file: Path, uri: str, leader_term: str) -> None:
        super().put(file, uri, leader_term)
        target = self._path(uri)
        self.node.put(target.name, target, target.stat().st_size)

    def trim(self, old: Sequence[Manifest], kept: Sequence[Manifest]) -> None:
        for payload in payloads_of(old):
            self.node.remove(payload_name(payload.uri))
        super().trim(old, kept)

    def close(self) -> None:
        self.node.close()

    def _path(self, uri: str) -> Path:
        return self._folder / payload_name(uri)


class PeerReader:
    """A reader's side: fetches from all peers that have a version and, with a ``node``, serves what it has.

    It serves the newest whole state, and KEPT_DELTAS deltas.
    """

    def __init__(self, connection: Connection, node: PeerNode | None = None) -> None:
        self._registry = node.registry if node is not None else PeerRegistry(connection)
        self._node = node
        self._download: Download | None = None
        self._closed = False

    def holds(self, payloads: Sequence[Payload]) -> bool:
        """Return whether other peers hold all of these payloads."""
        _, peers = self._registry.find()
        there = {name for peer in peers for name in peer.names if self._node is None or peer.id != self._node.id}
        return {payload_name(payload.uri) for payload in payloads} <= there

    def fetch(self, payload: Payload, folder: Path) -> Path:
        """Download a payload from peers into ``folder`` and return its file."""
        name = payload_name(payload.uri)
        reader, streams = (self._node.id, self._node.streams) if self._node is not None else ("reader", 1)
        try:
            with filling(payload, folder) as (target, aside):
                item = self._node.begin(name, aside, payload.size) if self._node is not None else None
                self._download = Download(payload, name, aside, self._registry, reader, streams)
                if self._closed:
                    # close() was called before it could see this download.
                    self._download.abandon()
                self._download.run(item)
        except BaseException:
            if self._node is not None:
                self._node.remove(name)
            raise
        self.forget_older(name)
        return target

    def forget_older(self, name: str) -> None:
        """Stop serving what the payload of this name replaces."""
        if self._node is None:
            return
        ending = name.rpartition(".")[2]
        others = [other for other in self._node.names() if other != name and other.endswith(ending)]
        for other in others if ending == "safetensors" else others[: 1 - KEPT_DELTAS]:
            self._node.remove(other)

    def offer(self, payload: Payload, path: Path) -> None:
        """Serve a whole state that was made from another one and deltas."""
        if self._node is not None and payload_name(payload.uri) not in self._node.names():
            self._node.put(payload_name(payload.uri), path, payload.size, at_once=False)

    def withdraw(self) -> None:
        """Stop serving whole states: their file is about to be changed or deleted."""
        if self._node is not None:
            for name in self._node.names():
                if name.endswith("safetensors"):
                    self._node.remove(name)

    def close(self) -> None:
        """Stop serving, and abandon all fetches."""
        self._closed = True
        if self._download is not None:
            self._download.abandon()
        if self._node is not None:
            self._node.close()


def payload_name(uri: str) -> str:
    """Return the name under which peers know a payload. InfraError if peers don't serve this URI."""
    name = uri.removeprefix("peer:")
    if not _NAME.fullmatch(name):
        raise InfraError(f"weights {uri!r} are not served by peers")
    return name
