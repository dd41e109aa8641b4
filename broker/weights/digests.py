"""Digests of weights: BLAKE3-128 of each 8 MB chunk, and of the chunks' digests for a state as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from blake3 import blake3

from schemas.errors import InfraError

CHUNK_BYTES = 8 * 1024 * 1024


def digest(data: bytes) -> str:
    """BLAKE3, 128 bits as 32 hex digits."""
    return blake3(data).hexdigest(length=16)


def chunks(file: Path) -> Iterator[bytes]:
    """The file in pieces of 8 MB."""
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk


def chunk_digests(file: Path) -> list[str]:
    """The digest of each 8 MB chunk."""
    return [digest(chunk) for chunk in chunks(file)]


def state_digest(chunk_digests: Sequence[str]) -> str:
    """One digest of a whole state from those of its chunks."""
    return digest("".join(chunk_digests).encode())


def verify(what: str, found: Sequence[str], expected: Sequence[str]) -> None:
    """InfraError names the first chunk of ``what`` that is not what the trainer published."""
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=False)):
        if ours != theirs:
            raise InfraError(f"{what}: chunk {index} is damaged")
    if len(found) != len(expected):
        raise InfraError(f"{what}: {len(found)} of {len(expected)} chunks are there")
