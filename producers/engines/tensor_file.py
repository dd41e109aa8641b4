"""Tensors of a safetensors file, as views of the mapped file.

safetensors' own reader is not used: as of 0.8.0 it leaks two integers for each tensor, and an engine reads every
version of a run.
"""

import json
import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from schemas.errors import DataError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def iterate_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor in the order of the file; the views remain valid when the file is deleted.

    OSError if it can't be opened, DataError for a type that is not in DTYPES. The header is not checked: the shapes
    were read from it before (weight_files.py).
    """
    with file.open("rb") as stream:
        # A private mapping, because PyTorch warns of read-only memory. No page is ever written, so none is copied.
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    (size,) = struct.unpack("<Q", mapped[:8])
    header = json.loads(mapped[8 : 8 + size])
    header.pop("__metadata__", None)
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        count, dtype = math.prod(entry["shape"]), DTYPES.get(entry["dtype"])
        if dtype is None:
            raise DataError(f"{file}: tensor {name} has type {entry['dtype']}, allowed: {', '.join(DTYPES)}")
        start = 8 + size + entry["data_offsets"][0]
        flat = (
            torch.frombuffer(mapped, dtype=dtype, count=count, offset=start) if count else torch.empty(0, dtype=dtype)
        )
        yield name, flat.view(entry["shape"])
