"""Ways for the bytes of a version to travel. A reader always ends with a local safetensors file.

``file``: a folder that trainer and generators share; the file itself is the payload.
``redis``: 8 MB chunks in the broker, for small models and machines that share no folder.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import redis

from broker.fence import accepted, incarnation
from broker.link import Link
from broker.queues import number
from schemas.errors import DiskError, InfraError
from schemas.messages import Manifest

CHUNK_BYTES = 8 * 1024 * 1024


class Transport(Protocol):
    """put() makes a version readable and returns its uri; fetch() gives a verified local file.

    holds() says whether all its bytes are there, restore() brings them back under the same uri; both consume ``file``.
    trim() frees the old versions, and what no version of ``kept`` (oldest first) names.
    """

    def put(self, file: Path, version: int, epoch: str) -> str: ...

    def fetch(self, manifest: Manifest, folder: Path) -> Path: ...

    def holds(self, manifest: Manifest) -> bool: ...

    def restore(self, file: Path, manifest: Manifest, epoch: str) -> None: ...

    def trim(self, old: Sequence[Manifest], kept: Sequence[Manifest]) -> None: ...


def chunk_digests(file: Path) -> list[str]:
    """BLAKE2b-128 of each 8 MB chunk."""
    return [hashlib.blake2b(chunk, digest_size=16).hexdigest() for chunk in _chunks(file)]


def _chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk


def verify(manifest: Manifest, digests: list[str]) -> None:
    """InfraError names the first chunk that is not what the trainer published."""
    for index, (found, expected) in enumerate(zip(digests, manifest.chunks, strict=False)):
        if found != expected:
            raise InfraError(f"weights version {manifest.version}: chunk {index} is damaged")
    if len(digests) != len(manifest.chunks):
        raise InfraError(
            f"weights version {manifest.version}: {len(digests)} of {len(manifest.chunks)} chunks are there"
        )


class FileTransport:
    """The payload stays where the trainer put it; readers check and map it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, file: Path, version: int, epoch: str) -> str:
        self._folder.mkdir(parents=True, exist_ok=True)
        target = self._folder / f"v{version}-e{incarnation(epoch)}.safetensors"
        os.replace(file, target)
        return f"file:{target}"

    def fetch(self, manifest: Manifest, folder: Path) -> Path:
        path = _path(manifest)
        try:
            verify(manifest, chunk_digests(path))
        except OSError as error:
            raise DiskError(f"weights version {manifest.version} cannot be read: {error}") from error
        return path

    def holds(self, manifest: Manifest) -> bool:
        path = _path(manifest)
        return path.is_file() and path.stat().st_size == manifest.size

    def restore(self, file: Path, manifest: Manifest, epoch: str) -> None:
        path = _path(manifest)
        path.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, path)

    def trim(self, old: Sequence[Manifest], kept: Sequence[Manifest]) -> None:
        for manifest in old:
            _path(manifest).unlink(missing_ok=True)


def _path(manifest: Manifest) -> Path:
    return Path(manifest.uri.removeprefix("file:"))


class RedisTransport:
    """The payload travels through the broker."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def put(self, file: Path, version: int, epoch: str) -> str:
        for index, chunk in enumerate(_chunks(file)):
            accepted(self._link.script("weights_put", epoch, f"{version}:{index}", chunk), epoch)
        file.unlink()
        return f"redis:{version}"

    def fetch(self, manifest: Manifest, folder: Path) -> Path:
        target = folder / f"v{manifest.version}-e{manifest.epoch}.safetensors"
        try:
            self._write(manifest, target)
        except OSError as error:
            raise DiskError(f"weights version {manifest.version} cannot be written to {target}: {error}") from error
        return target

    def _write(self, manifest: Manifest, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        digests = []
        with target.with_suffix(".part").open("wb") as stream:
            for index in range(len(manifest.chunks)):
                chunk = self._link.run(
                    "fetching weights", lambda client, index: self._get(client, manifest, index), index
                )
                digests.append(hashlib.blake2b(chunk, digest_size=16).hexdigest())
                stream.write(chunk)
        verify(manifest, digests)
        os.replace(target.with_suffix(".part"), target)

    def _get(self, client: redis.Redis, manifest: Manifest, index: int) -> bytes:
        chunk: Any = client.hget(self._link.keys.chunks, f"{manifest.version}:{index}")
        if not isinstance(chunk, bytes):
            raise InfraError(f"weights version {manifest.version} is gone from the broker")
        return chunk

    def holds(self, manifest: Manifest) -> bool:
        wanted = {f"{manifest.version}:{index}".encode() for index in range(len(manifest.chunks))}
        return wanted <= self._fields()

    def restore(self, file: Path, manifest: Manifest, epoch: str) -> None:
        self.put(file, manifest.version, epoch)

    def trim(self, old: Sequence[Manifest], kept: Sequence[Manifest]) -> None:
        kept_versions, newest = {manifest.version for manifest in kept}, kept[-1].version

        def freed(field: bytes) -> bool:
            # A later version is on its way here; an earlier one without a manifest can never get one.
            version = number(field.partition(b":")[0])
            return version < newest and version not in kept_versions

        gone = [field for field in self._fields() if freed(field)]
        if gone:
            self._link.run("deleting old weights", lambda client: client.hdel(self._link.keys.chunks, *gone))

    def _fields(self) -> set[bytes]:
        found: Any = self._link.run("listing weights", lambda client: client.hkeys(self._link.keys.chunks))
        return set(found)
