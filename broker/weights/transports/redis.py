"""Weights through the broker in chunks of 1 MB: for small models, deltas, and machines without a shared folder."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from broker.connection.connection import RunData
from broker.flow.fencing import run_fenced
from broker.queues.consumer_group import number
from broker.weights.transports.base import Form, Transport
from broker.weights.transports.file import filling
from schemas.digests import chunks, digest
from schemas.errors import InfraError
from schemas.messages import Manifest, Payload


class RedisTransport(RunData, Transport):
    """The broker itself: payloads are fields of a hash, a chunk each."""

    def uri(self, version: int, leader_term: str, form: Form = "whole") -> str:
        # The version comes first, so that ``trim`` recognises chunks of old versions.
        return f"redis:{version}" if form == "whole" else f"redis:{version}:delta"

    def put(self, file: Path, uri: str, leader_term: str) -> None:
        for index, chunk in enumerate(chunks(file)):
            run_fenced(self._connection, "put_chunk", leader_term, f"{_name(uri)}:{index}", chunk)
        file.unlink()

    def fetch(self, payload: Payload, folder: Path) -> Path:
        with filling(payload, folder) as (target, aside), aside.open("r+b") as stream:
            stream.writelines(self._read(payload))
        return target

    def check(self, payload: Payload) -> None:
        for _ in self._read(payload):
            continue

    def _read(self, payload: Payload) -> Iterator[bytes]:
        for index, (field, expected) in enumerate(zip(_fields(payload), payload.chunks, strict=True)):
            chunk = self._connection.run_command("fetching weights", "hget", self._keys.chunks, field)
            if chunk is None:
                raise InfraError(f"chunk {field} is gone from the broker")
            if digest(chunk) != expected:
                raise InfraError(f"{payload.uri}: chunk {index} is damaged")
            yield chunk

    def holds(self, payloads: Sequence[Payload]) -> bool:
        wanted = {field.encode() for payload in payloads for field in _fields(payload)}
        return wanted <= self._there()

    def trim(self, old: Sequence[Manifest], kept: Sequence[Manifest]) -> None:
        kept_versions, newest = {manifest.version for manifest in kept}, kept[-1].version

        def freed(field: bytes) -> bool:
            # A later version is being put now; an earlier one without a manifest never gets one.
            version = number(field.partition(b":")[0])
            return version < newest and version not in kept_versions

        gone = [field for field in self._there() if freed(field)]
        if gone:
            self._connection.run_command("deleting old weights", "hdel", self._keys.chunks, *gone)

    def _there(self) -> set[bytes]:
        return set(self._connection.run_command("listing weights", "hkeys", self._keys.chunks))


def _name(uri: str) -> str:
    return uri.removeprefix("redis:")


def _fields(payload: Payload) -> list[str]:
    return [f"{_name(payload.uri)}:{index}" for index in range(len(payload.chunks))]
