"""Tells one model folder from another: what an adapter belongs to, and what a generator has under it.

A digest of every tensor's name, type, shape and first 4 KB. Training moves nearly every weight, so that is enough to
see another model, and takes milliseconds where reading all of it takes minutes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from broker.weights.digests import digest
from schemas.errors import DataError

SAMPLE = 4096
"""Bytes of each tensor that count."""
_MAX_HEADER = 100_000_000


def base_digest(folder: Path) -> str:
    """32 hex digits, the same however the tensors are spread over files. DataError: no safetensors files to read."""
    found = dict(item for file in _files(folder) for item in _tensors(file))
    return digest("\n".join(f"{name} {found[name]}" for name in sorted(found)).encode())


def _files(folder: Path) -> list[Path]:
    """Those that transformers loads; a folder may hold the same weights once more in another layout."""
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
    """Of each tensor its name, and type, shape and a digest of its first bytes."""
    try:
        with file.open("rb") as stream:
            size = struct.unpack("<Q", stream.read(8))[0]
            if size > _MAX_HEADER:
                raise DataError(f"{file} is not a safetensors file: header of {size} bytes")
            for name, entry in json.loads(stream.read(size)).items():
                if name != "__metadata__":
                    start, end = entry["data_offsets"]
                    stream.seek(8 + size + start)
                    sample = digest(stream.read(min(SAMPLE, end - start)))
                    yield name, f"{entry['dtype']} {entry['shape']} {sample}"
    except OSError as error:
        raise DataError(f"{file} can't be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise DataError(f"{file} is not a safetensors file: {error}") from error
