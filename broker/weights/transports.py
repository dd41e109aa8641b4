"""Ways for the bytes of a version to travel. A reader always ends with a checked local file.

``file``: a folder that trainer and generators share; the file itself is the payload.
``redis``: 1 MB chunks in the broker, for small models, deltas, and machines that share no folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import redis

from broker.connection.connection import Connection
from broker.flow.fencing import accepted, term_number
from broker.queues.consumer_group import number
from schemas.digests import chunk_digests, chunks, digest, verify
from schemas.errors import DiskError, InfraError
from schemas.messages import Manifest, Payload

Form = Literal["whole", "delta"]
"""What the bytes are: a safetensors file, or the difference to the version before."""


class Transport(Protocol):
    """put() makes a file readable under a uri and consumes it; fetch() gives a verified local file.

    uri() is where a version's bytes are, or would be. holds() says whether all bytes are there, check() looks at each
    of them: InfraError. trim() frees the old versions, and what no version of ``kept`` (oldest first) names.
    """

    def uri(self, version: int, leader_term: str, form: Form = "whole") -> str: ...

    def put(self, file: Path, uri: str, leader_term: str) -> None: ...

    def fetch(self, payload: Payload, folder: Path) -> Path: ...

    def check(self, payload: Payload) -> None: ...

    def holds(self, payloads: Sequence[Payload]) -> bool: ...

    def trim(self, old: Sequence[Manifest], kept: Sequence[Manifest]) -> None: ...


class FileTransport:
    """The payload stays where the trainer put it; readers check and map it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def uri(self, version: int, leader_term: str, form: Form = "whole") -> str:
        ending = "safetensors" if form == "whole" else "delta"
        return f"file:{self._folder / f'v{version}-t{term_number(leader_term)}.{ending}'}"

    def put(self, file: Path, uri: str, leader_term: str) -> None:
        target = _path(uri)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, target)

    def fetch(self, payload: Payload, folder: Path) -> Path:
        self.check(payload)
        return _path(payload.uri)

    def check(self, payload: Payload) -> None:
        path = _path(payload.uri)
        try:
            verify(str(path), chunk_digests(path), payload.chunks)
        except OSError as error:
            raise DiskError(f"{path} cannot be read: {error}") from error

    def holds(self, payloads: Sequence[Payload]) -> bool:
        paths = [(_path(payload.uri), payload.size) for payload in payloads]
        return all(path.is_file() and path.stat().st_size == size for path, size in paths)

    def trim(self, old: Sequence[Manifest], kept: Sequence[Manifest]) -> None:
        for manifest in old:
            _path(manifest.state.uri).unlink(missing_ok=True)
            if manifest.delta is not None:
                _path(manifest.delta.payload.uri).unlink(missing_ok=True)


def _path(uri: str) -> Path:
    return Path(uri.removeprefix("file:"))


class RedisTransport:
    """The payload travels through the broker."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def uri(self, version: int, leader_term: str, form: Form = "whole") -> str:
        # The version comes first: by it a chunk is known to be of no use any more.
        return f"redis:{version}" if form == "whole" else f"redis:{version}:delta"

    def put(self, file: Path, uri: str, leader_term: str) -> None:
        for index, chunk in enumerate(chunks(file)):
            accepted(
                self._connection,
                self._connection.run_script("put_chunk", leader_term, f"{_name(uri)}:{index}", chunk),
                leader_term,
            )
        file.unlink()

    def fetch(self, payload: Payload, folder: Path) -> Path:
        # One name for all versions: what a reader that was killed leaves is replaced by its successor.
        target = folder / ("delta" if _name(payload.uri).endswith("delta") else "whole")
        aside = target.with_suffix(".part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with aside.open("wb") as stream:
                stream.writelines(self._read(payload))
            os.replace(aside, target)
        except OSError as error:
            raise DiskError(f"{payload.uri} cannot be written to {target}: {error}") from error
        return target

    def check(self, payload: Payload) -> None:
        for _ in self._read(payload):
            continue

    def _read(self, payload: Payload) -> Iterator[bytes]:
        """Its chunks, each one checked."""
        for index, (field, expected) in enumerate(zip(_fields(payload), payload.chunks, strict=True)):
            chunk = self._connection.run("fetching weights", lambda client, field: self._get(client, field), field)
            if digest(chunk) != expected:
                raise InfraError(f"{payload.uri}: chunk {index} is damaged")
            yield chunk

    def _get(self, client: redis.Redis, field: str) -> bytes:
        chunk: Any = client.hget(self._connection.keys.chunks, field)
        if not isinstance(chunk, bytes):
            raise InfraError(f"chunk {field} is gone from the broker")
        return chunk

    def holds(self, payloads: Sequence[Payload]) -> bool:
        wanted = {field.encode() for payload in payloads for field in _fields(payload)}
        return wanted <= self._there()

    def trim(self, old: Sequence[Manifest], kept: Sequence[Manifest]) -> None:
        kept_versions, newest = {manifest.version for manifest in kept}, kept[-1].version

        def freed(field: bytes) -> bool:
            # A later version is on its way here; an earlier one without a manifest can never get one.
            version = number(field.partition(b":")[0])
            return version < newest and version not in kept_versions

        gone = [field for field in self._there() if freed(field)]
        if gone:
            self._connection.run(
                "deleting old weights", lambda client: client.hdel(self._connection.keys.chunks, *gone)
            )

    def _there(self) -> set[bytes]:
        found: Any = self._connection.run("listing weights", lambda client: client.hkeys(self._connection.keys.chunks))
        return set(found)


def _name(uri: str) -> str:
    return uri.removeprefix("redis:")


def _fields(payload: Payload) -> list[str]:
    return [f"{_name(payload.uri)}:{index}" for index in range(len(payload.chunks))]
