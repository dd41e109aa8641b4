"""Digests of weights, which trainer, broker and generators compare: BLAKE3, 128 bits.

A weight version has a digest for each 1 MB chunk of its file, and one over these for the whole state. A model folder
has ``base_digest``, over every tensor's name, type, shape and first 4 KB: it tells which model an adapter belongs to,
and which a generator has under it. Training moves nearly every weight, so a sample is enough to see another model, and
takes milliseconds where reading all of it takes minutes.
"""

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from blake3 import blake3

from schemas.errors import DataError, InfraError
from schemas.weight_files import read_header

DIGEST = "[0-9a-f]{32}"
"""A digest as a regular expression."""
CHUNK_BYTES = 1024 * 1024
"""Larger chunks cost the server twice the time, and keep it from its other clients for as long."""

SHARE = 16
"""Chunks that a thread hashes at a time."""
THREADS = min(4, os.cpu_count() or 1)


def digest(data: bytes | memoryview) -> str:
    """Return the BLAKE3 digest of ``data``: 128 bits as 32 hex digits."""
    return blake3(data).hexdigest(length=16)


def chunks(file: Path) -> Iterator[bytes]:
    """Yield a file in chunks of 1 MB, the last one shorter."""
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk


def chunk_digests(file: Path) -> list[str]:
    """Return the digest of each 1 MB chunk of a file, computed by up to THREADS threads. OSError: it can't be read."""
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
    """Return the digest of a whole state, from the digests of its chunks."""
    return digest("".join(chunk_digests).encode())


def verify(what: str, found: Sequence[str], expected: Sequence[str]) -> None:
    """Compare digests of chunks; InfraError names the first chunk of ``what`` that differs from what was published."""
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=False)):
        if ours != theirs:
            raise InfraError(f"{what}: chunk {index} is damaged")
    if len(found) != len(expected):
        raise InfraError(f"{what}: {len(found)} of {len(expected)} chunks are there")


SAMPLE = 4096
"""Bytes of each tensor that count."""


def base_digest(folder: Path) -> str:
    """Return a model folder's digest, 32 hex digits, the same however its tensors are spread over files.

    DataError when there is no safetensors file, or one can't be read.
    """
    found = dict(item for file in _files(folder) for item in _tensors(file))
    return digest("\n".join(f"{name} {found[name]}" for name in sorted(found)).encode())


def _files(folder: Path) -> list[Path]:
    """List the files that transformers loads; a folder may hold the same weights once more in another layout."""
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            return [folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise DataError(f"{index} can't be read: {error}") from error
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise DataError(f"{folder} holds no safetensors file")
    return files


def _tensors(file: Path) -> Iterator[tuple[str, str]]:
    """Yield each tensor's name with its type, shape and a digest of its first bytes."""
    header, data = read_header(file)
    try:
        with file.open("rb") as stream:
            for name, entry in header.items():
                start, end = entry["data_offsets"]
                stream.seek(data + start)
                yield name, f"{entry['dtype']} {entry['shape']} {digest(stream.read(min(SAMPLE, end - start)))}"
    except OSError as error:
        raise DataError(f"{file} can't be read: {error.strerror}") from error
