"""Weights in a folder shared by trainer and generators: the payload is the file that the trainer wrote."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from broker.flow.fencing import term_number
from broker.weights.transports.base import Form
from schemas.digests import chunk_digests, verify
from schemas.errors import DiskError
from schemas.messages import Manifest, Payload


class FileTransport:
    """A shared folder: the payload stays where the trainer put it; readers check and map it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def uri(self, version: int, leader_term: str, form: Form = "whole") -> str:
        ending = "safetensors" if form == "whole" else "delta"
        return f"file:{self._folder / f'v{version}-t{term_number(leader_term)}.{ending}'}"

    def put(self, file: Path, uri: str, leader_term: str) -> None:
        target = _path(uri)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, target)

    def spreading(self, payload: Payload, leader_term: str) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        """Do nothing: nothing runs."""

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
