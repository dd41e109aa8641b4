"""Digests of weights: BLAKE3-128 of each 1 MB chunk, and of the chunks' digests for a state as a whole."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from blake3 import blake3

from schemas.errors import InfraError

CHUNK_BYTES = 1024 * 1024
"""Larger ones cost the server twice the time, and keep it from its other clients for as long."""

SHARE = 16
"""Chunks that a thread hashes at a time."""
THREADS = min(4, os.cpu_count() or 1)


def digest(data: bytes | memoryview) -> str:
    """BLAKE3, 128 bits as 32 hex digits."""
    return blake3(data).hexdigest(length=16)


def chunks(file: Path) -> Iterator[bytes]:
    """The file in pieces of 1 MB."""
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk


def chunk_digests(file: Path) -> list[str]:
    """The digest of each 1 MB chunk, by as many threads as pay."""
    size = file.stat().st_size
    count = -(-size // CHUNK_BYTES)
    shares = range(0, count, SHARE)
    hash_share = partial(_hash_share, file)
    if len(shares) < 2:
        found = [hash_share(first) for first in shares]
    else:
        with ThreadPoolExecutor(THREADS, thread_name_prefix="digests") as threads:
            found = list(threads.map(hash_share, shares))
    return [digest for share in found for digest in share]


def _hash_share(file: Path, first: int) -> list[str]:
    """Digests of ``SHARE`` chunks from number ``first`` on; hashing and reading leave the interpreter free."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    found: list[str] = []
    with file.open("rb", buffering=0) as stream:
        stream.seek(first * CHUNK_BYTES)
        while len(found) < SHARE and (read := stream.readinto(buffer)):
            found.append(digest(buffer[:read]))
    return found


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
