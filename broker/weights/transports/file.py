"""Weights in a folder shared by trainer and generators: the payload is the file that the trainer wrote."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from broker.flow.fencing import term_number
from broker.weights.transports.base import Form, Transport
from schemas.digests import chunk_digests, verify
from schemas.errors import DiskError
from schemas.messages import Manifest, Payload


class FileTransport(Transport):
    """A folder: the payload stays where the trainer put it; readers that share the folder check and map it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def uri(self, version: int, leader_term: str, form: Form = "whole") -> str:
        return f"file:{self._folder / version_file(version, leader_term, form)}"

    def put(self, file: Path, uri: str, leader_term: str) -> None:
        target = self._path(uri)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, target)

    def fetch(self, payload: Payload, folder: Path) -> Path:
        self.check(payload)
        return self._path(payload.uri)

    def check(self, payload: Payload) -> None:
        path = self._path(payload.uri)
        try:
            verify(str(path), chunk_digests(path), payload.chunks)
        except OSError as error:
            raise DiskError(f"{path} cannot be read: {error}") from error

    def holds(self, payloads: Sequence[Payload]) -> bool:
        paths = [(self._path(payload.uri), payload.size) for payload in payloads]
        return all(path.is_file() and path.stat().st_size == size for path, size in paths)

    def trim(self, old: Sequence[Manifest], kept: Sequence[Manifest]) -> None:
        for payload in payloads_of(old):
            self._path(payload.uri).unlink(missing_ok=True)

    def _path(self, uri: str) -> Path:
        return Path(uri.removeprefix("file:"))


def version_file(version: int, leader_term: str, form: Form) -> str:
    """Return the name of a version's file."""
    return f"v{version}-t{term_number(leader_term)}.{'safetensors' if form == 'whole' else 'delta'}"


def payloads_of(manifests: Sequence[Manifest]) -> Iterator[Payload]:
    """Yield the states of these versions, and their deltas."""
    for manifest in manifests:
        yield manifest.state
        if manifest.delta is not None:
            yield manifest.delta.payload


@contextmanager
def filling(payload: Payload, folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield a payload's path in ``folder``, and an empty file of its size to fill, which is then moved to that path."""
    # One name for all versions, so that the next reader replaces what a killed one left.
    target = folder / ("delta" if payload.uri.endswith("delta") else "whole")
    aside = target.with_suffix(".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        aside.unlink(missing_ok=True)
        with aside.open("wb") as stream:
            stream.truncate(payload.size)
        yield target, aside
        os.replace(aside, target)
    except OSError as error:
        raise DiskError(f"{payload.uri} cannot be written to {target}: {error}") from error
    finally:
        aside.unlink(missing_ok=True)
