"""Reading of torch.distributed.checkpoint's files without running what they say: two parts of them are pickles.

A checkpoint lies where other services may write, and may be another user's. PyTorch's own reader would run any function
that ``.metadata`` or a value that is no tensor names.
"""

import enum
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

_CHECKPOINT = "torch.distributed.checkpoint"
ALLOWED = {
    *(
        (f"{_CHECKPOINT}.metadata", name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}
"""Classes and functions that ``.metadata`` may name, beside PyTorch's types of numbers."""


class SafeReader(FileSystemReader):
    """Reads a checkpoint's folder; UnpicklingError if its ``.metadata`` names what no checkpoint of ours does."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read ``.metadata`` without running its code. UnpicklingError for more than ALLOWED, or no Metadata."""
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as stream:
            found = _Unpickler(stream).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(".metadata does not describe a checkpoint")
        if found.storage_meta is None:
            found.storage_meta = StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


def _member(kind: Any, name: str) -> enum.Enum:
    """Return a member of an enumeration, which Python 3.11.2, that of Debian 12, stores as a call of getattr."""
    if not (isinstance(kind, enum.EnumType) and isinstance(name, str) and name in kind.__members__):
        raise pickle.UnpicklingError(f".metadata asks for {name!r} of {kind!r}: it may have been tampered with")
    return kind.__members__[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        known = (module, name) in ALLOWED
        if known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f".metadata names {module}.{name}, which no checkpoint holds: it may have been tampered with"
        )
