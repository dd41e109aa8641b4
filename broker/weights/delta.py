"""Lossless difference between two states of the same layout: only the elements whose bits changed.

It is coded block by block, so that memory is bounded for tensors of any size and a delta is written and applied as a
stream. The result is equal bit for bit, whatever the bits mean.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

from schemas.errors import InfraError

Bytes: TypeAlias = npt.NDArray[np.uint8]
Words: TypeAlias = npt.NDArray[Any]

MAGIC = b"TMDELTA1"
BLOCK = 1 << 18
"""Elements coded together: both states of a block of bfloat16 fit the cache, and tables cost 1 % of a block."""
DENSE = 0.3
"""Share of changed elements above which their positions cost more than zeros for the unchanged ones."""
MOST_CODED = 2 * 8 * BLOCK
"""Most bytes of one coded part of a block; incompressible data grows by less than 1 %."""
LEVEL = 1
"""Level of zstd; levels 3 and 9 made deltas at most 1 % smaller."""

_BLOCK = struct.Struct("<QIBIII")
"""First byte, elements, bytes of an element, changed elements, bytes of coded gaps (0: dense), of coded values."""
_UNSIGNED = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}
_SIGNED = {width: np.dtype(f"<i{width}") for width in (1, 2, 4, 8)}


@dataclass(frozen=True)
class Extent:
    """Position of a tensor in a state: bytes [start, stop), elements of ``width`` bytes (1, 2, 4 or 8)."""

    start: int
    stop: int
    width: int

    def __post_init__(self) -> None:
        if self.width not in _UNSIGNED or (self.stop - self.start) % self.width or not 0 <= self.start <= self.stop:
            raise ValueError(f"bytes [{self.start}, {self.stop}) are not a tensor of {self.width}-byte elements")


def write_delta(old: Bytes, new: Bytes, extents: Iterable[Extent], out: BinaryIO, limit: int) -> int | None:
    """Write the delta from ``old`` to ``new``; return the bytes written, None if over ``limit``.

    old, new: uint8 [bytes of the state], for example mapped files. They must be equal outside ``extents``.
    """
    size = out.write(MAGIC)
    for extent in extents:
        for start in range(extent.start, extent.stop, BLOCK * extent.width):
            stop = min(start + BLOCK * extent.width, extent.stop)
            block = _encode(start, old[start:stop], new[start:stop], extent.width)
            size += out.write(block)
            if size > limit:
                return None
    return size


def apply_delta(state: Bytes, delta: BinaryIO) -> None:
    """Change ``state``, uint8 [bytes], in place. InfraError if ``delta`` is not a delta for a state of this size.

    After an error the state is neither the old nor the new one.
    """
    if delta.read(len(MAGIC)) != MAGIC:
        raise InfraError("this is not a delta")
    for start, count, width, changed, gaps, values in _blocks(delta):
        stop = start + count * width
        if stop > len(state):
            raise InfraError(f"the delta has a block of bytes [{start}, {stop}) for a state of {len(state)}")
        words = state[start:stop].view(_UNSIGNED[width])
        if gaps is None:
            words += _differences(values, count, width)
        else:
            positions = _positions(gaps, changed)
            if changed and positions[-1] >= count:
                raise InfraError(f"the delta names element {positions[-1]} of {count}")
            words[positions] += _differences(values, changed, width)


def _encode(start: int, old: Bytes, new: Bytes, width: int) -> bytes:
    """Encode a block; b"" if nothing changed."""
    difference = new.view(_UNSIGNED[width]) - old.view(_UNSIGNED[width])
    positions = np.flatnonzero(difference != 0)
    if not positions.size:
        return b""
    compress = zstandard.ZstdCompressor(level=LEVEL, write_content_size=False).compress
    gaps = b""
    if positions.size < DENSE * difference.size:
        gaps = compress(_gaps(positions).data)
        difference = difference[positions]
    values = compress(_planes(difference, width).data)
    head = _BLOCK.pack(start, len(old) // width, width, positions.size, len(gaps), len(values))
    return head + gaps + values


def _blocks(delta: BinaryIO) -> Iterator[tuple[int, int, int, int, bytes | None, bytes]]:
    while head := delta.read(_BLOCK.size):
        if len(head) < _BLOCK.size:
            raise InfraError("the delta is cut short")
        start, count, width, changed, coded_gaps, coded_values = _BLOCK.unpack(head)
        if width not in _UNSIGNED:
            raise InfraError(f"the delta has elements of {width} bytes")
        if not changed <= count <= BLOCK or max(coded_gaps, coded_values) > MOST_CODED:
            # Checked before memory of a size that the delta names is allocated.
            raise InfraError(f"the delta is damaged: a block of {count} elements, {changed} of them changed")
        # A gap takes one byte, and one more for each 255 elements that it skips.
        gaps = _expand(delta.read(coded_gaps), changed + count // 255) if coded_gaps else None
        values = _expand(delta.read(coded_values), (count if gaps is None else changed) * width)
        yield start, count, width, changed, gaps, values


def _expand(coded: bytes, most: int) -> bytes:
    try:
        # Checked first, because this much memory is allocated in spite of max_output_size.
        if (size := zstandard.frame_content_size(coded)) > most:
            raise InfraError(f"the delta is damaged: {size} bytes where {most} can be")
        return zstandard.ZstdDecompressor().decompress(coded, max_output_size=max(most, 1), allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise InfraError(f"the delta is damaged: {error}") from error


def _gaps(positions: npt.NDArray[np.int64]) -> Bytes:
    """Encode the number of unchanged elements before each changed one: a byte 255 for each 255, then the rest."""
    skipped = np.diff(positions, prepend=-1) - 1
    if skipped.max() < 255:
        return skipped.astype(np.uint8)
    long, rest = np.divmod(skipped, 255)
    coded = np.full(int(long.sum()) + rest.size, 255, np.uint8)
    coded[np.cumsum(long + 1) - 1] = rest
    return coded


def _positions(coded: bytes, changed: int) -> npt.NDArray[np.int64]:
    gaps = np.frombuffer(coded, np.uint8)
    ends = gaps != 255
    positions: npt.NDArray[np.int64] = np.cumsum(gaps + ends.astype(np.int64))[ends] - 1
    if len(positions) != changed:
        raise InfraError(f"the delta names {len(positions)} of {changed} changed elements")
    return positions


def _planes(difference: Words, width: int) -> Bytes:
    """Fold signed differences 0, -1, 1, -2, ... to 0, 1, 2, 3, ...; put all lowest bytes first, then the next ones.

    Floats of one sign that are close in value are close in bits, so small steps leave the upper planes empty.
    """
    signed = difference.view(_SIGNED[width])
    folded = (signed << 1) ^ (signed >> (8 * width - 1))
    planes: Bytes = folded.view(np.uint8).reshape(-1, width).T.copy().reshape(-1)
    return planes


def _differences(planes: bytes, count: int, width: int) -> Words:
    if len(planes) != count * width:
        raise InfraError(f"the delta holds {len(planes)} bytes for {count} elements of {width}")
    columns = np.frombuffer(planes, np.uint8).reshape(width, count).T.copy()
    folded = columns.reshape(-1).view(_UNSIGNED[width])
    one = folded.dtype.type(1)
    differences: Words = (folded >> one) ^ (~(folded & one) + one)
    return differences
