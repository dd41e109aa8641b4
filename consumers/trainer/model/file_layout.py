"""From the tensors of a model in memory to those of its file, which ranks write together, each its own parts.

transformers keeps some weights in memory in another form than in files: all experts of a layer as one tensor, or a
tensor under another name. Engines read the form of files, so that this is what is published. Where a rank's part of a
tensor makes parts of the file by itself, no rank ever has the whole tensor; a rank that does not see the file sends its
parts to rank 0.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard

from consumers.trainer.distributed.channel import Channel
from consumers.trainer.distributed.parts import own_blocks
from consumers.trainer.distributed.ranks import Ranks, local_part
from consumers.trainer.model.policy import DTYPES
from schemas.messages import TensorSpec

if TYPE_CHECKING:  # importing it takes seconds, and model.kind mlp does not need it
    from transformers import PreTrainedModel

Shapes = dict[str, tuple[int, ...]]
_STORED = DTYPES | {"int64": torch.int64, "int32": torch.int32}
_NAMES = {dtype: name for name, dtype in _STORED.items()}
_SAFETENSORS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int64": "I64", "int32": "I32"}
_LAST_NUMBER = re.compile(r"\.(\d+)\.(?!.*\.\d+\.)")
ROWS = 8
"""Experts of a layer that are converted at a time."""
BUCKET = 1 << 25
"""Elements of a tensor that are copied at a time."""
_PART = struct.Struct("<QI")
"""Place and length of bytes in a message."""
SENT = 1 << 22
"""Bytes of a message to rank 0."""
Put: TypeAlias = Callable[[memoryview | bytes, int], None]
"""Writes bytes at a place of the file; OSError if there is no room."""


@dataclass(frozen=True)
class TensorConversion:
    """How some tensors of a model become tensors of its file.

    sources: their names in the model. shapes: names and shapes in the file, in its order. model: None if the one source
    is stored as it is, perhaps under another name. by_rows: whether each index of the source's first dimension makes
    tensors of its own, whose names have it as their last number.
    """

    sources: Sequence[str]
    shapes: Shapes
    model: PreTrainedModel | None = field(default=None, repr=False)
    by_rows: bool = False

    def apply(self, tensors: Sequence[Tensor], first: int = 0) -> dict[str, Tensor]:
        """Convert the tensors of ``sources``; if they change, a copy is made. first: index of the first row given."""
        if self.model is None:
            return dict(zip(self.shapes, tensors, strict=True))
        made = _revert(self.model, dict(zip(self.sources, tensors, strict=True)))
        return {_shift(name, first): tensor for name, tensor in made.items()}


def conversions(model: PreTrainedModel, shapes: Mapping[str, Sequence[int]]) -> list[TensorConversion]:
    """Return the conversions that together store tensors of these names and ``shapes`` in memory, one tensor each.

    Tensors that only together make one of the file are in one conversion, the last.
    """
    empty = {name: torch.empty(tuple(shape), device="meta") for name, shape in shapes.items()}
    stored = _shapes(_revert(model, dict(empty)))
    found, together = [], []
    for name, tensor in empty.items():
        alone = _revert(model, {name: tensor})
        if any(stored.get(key) != shape for key, shape in _shapes(alone).items()):
            together.append(name)
            continue
        unchanged = [each is tensor for each in alone.values()] == [True]
        rows = not unchanged and _is_by_rows(model, name, tensor, _shapes(alone))
        found.append(TensorConversion([name], _shapes(alone), None if unchanged else model, rows))
    if together:
        rest = {name: shape for name, shape in stored.items() if not any(name in each.shapes for each in found)}
        found.append(TensorConversion(together, rest, model))
    return found


def _revert(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Turn a model's tensors into those of its files."""
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return found


def _is_by_rows(model: PreTrainedModel, name: str, tensor: Tensor, shapes: Shapes) -> bool:
    """Return whether the rows of a tensor without data become the tensors of these names and shapes one by one."""
    if tensor.ndim < 2 or len(tensor) < 2:
        return False
    row = _shapes(_revert(model, {name: tensor[:1]}))
    return {_shift(key, n): shape for n in range(len(tensor)) for key, shape in row.items()} == shapes


def _shift(name: str, by: int) -> str:
    return _LAST_NUMBER.sub(lambda found: f".{int(found[1]) + by}.", name) if by else name


def _shapes(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@dataclass(frozen=True)
class FileLayout:
    """Content of a safetensors file, and how it is made of a model's weights. Tied weights appear once.

    conversions: in the order of the file. dtypes: of each of the model's tensors in the file, by its name in memory.
    """

    conversions: Sequence[TensorConversion]
    dtypes: Mapping[str, torch.dtype]

    @property
    def specs(self) -> list[TensorSpec]:
        """Names, dtypes and shapes of the file's tensors."""
        return [
            TensorSpec(name, _NAMES[self.dtypes[conversion.sources[0]]], list(shape))
            for conversion in self.conversions
            for name, shape in conversion.shapes.items()
        ]

    @cached_property
    def head(self) -> bytes:
        """The head of the file: the length of its JSON as uint64, then the JSON, padded to 8 bytes."""
        entries: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
        for spec, ends in zip(self.specs, pairwise(self._offsets), strict=True):
            entries[spec.name] = {"dtype": _SAFETENSORS[spec.dtype], "shape": spec.shape, "data_offsets": ends}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        return self._offsets[-1]

    @property
    def _offsets(self) -> list[int]:
        """Return the byte behind the head at which each tensor begins, and the one at which the last ends."""
        sizes = (math.prod(spec.shape) * _STORED[spec.dtype].itemsize for spec in self.specs)
        return [0, *accumulate(sizes)]

    def split(self, most: int) -> list[FileLayout]:
        """Return the layouts of several files, each of at most so many bytes, or of one conversion."""
        groups, size = list[list[TensorConversion]](), 0
        for conversion in self.conversions:
            own = FileLayout([conversion], self.dtypes).size
            if not groups or size + own > most:
                groups.append([])
                size = 0
            groups[-1].append(conversion)
            size += own
        return [FileLayout(group, self.dtypes) for group in groups]

    @cached_property
    def places(self) -> dict[str, int]:
        """The byte of the file at which each tensor begins."""
        return {spec.name: len(self.head) + at for spec, at in zip(self.specs, self._offsets, strict=False)}

    def pieces(self, weights: Callable[[str], Tensor], file: SharedFile) -> Iterator[FilePiece]:
        """Yield what this rank writes of ``weights``. All ranks iterate at the same time: some are gathered."""
        rank, world = file.rank, file.world
        for number, conversion in enumerate(self.conversions):
            dtype = self.dtypes[conversion.sources[0]]
            sources = [weights(name) for name in conversion.sources]
            if _apart(conversion, sources):
                part = local_part(sources[0])
                for own, block in own_blocks(sources[0]) if _writes(sources[0], rank) else ():
                    yield FilePiece(self, conversion, [part[own]], dtype, [each.start for each in block])
            elif conversion.by_rows and isinstance(sources[0], DTensor):
                for first, rows in _gathered_rows(sources[0], dtype):
                    if _writes(sources[0], rank, gathered=True):
                        yield FilePiece(self, conversion, [rows], dtype, [first], gathered=True)
            elif world > 1 and any(isinstance(source, DTensor) for source in sources):
                gathered = [whole(source, dtype) for source in sources]
                if rank == (0 if file.blind else number % world):
                    yield FilePiece(self, conversion, gathered, dtype, gathered=True)
            elif rank == 0:
                # A module's parameter is replaced by its gathered form while the step computes; its one part stays.
                yield FilePiece(self, conversion, [local_part(source) for source in sources], dtype)


@dataclass(frozen=True)
class FilePiece:
    """What one rank writes of a conversion. start: where its part of the one source begins; None for all of it.

    gathered: whether the sources are copies, which take memory until they are written.
    """

    layout: FileLayout
    conversion: TensorConversion
    sources: Sequence[Tensor]
    dtype: torch.dtype
    start: Sequence[int] | None = None
    gathered: bool = False

    @torch.no_grad()
    def write(self, put: Put) -> None:
        """Write it in the file's type; copy ``BUCKET`` elements or ``ROWS`` experts at a time. OSError if it fails."""
        conversion = self.conversion
        if conversion.model is None:
            (name, shape), (source,) = next(iter(conversion.shapes.items())), self.sources
            start = list(self.start or [0] * len(shape))
            rows = max(1, BUCKET * len(source) // max(1, source.numel())) if shape else 0
            for part in source.split(rows) if shape else [source]:
                self._write(put, name, part, shape, start)
                start[:1] = [at + len(part) for at in start[:1]]
            return
        if not conversion.by_rows:
            self._convert(put, [source.to(self.dtype) for source in self.sources])
            return
        (source,), first = self.sources, self.start[0] if self.start else 0
        for row in range(0, len(source), ROWS):
            self._convert(put, [source[row : row + ROWS].to(self.dtype)], first + row)

    def _convert(self, put: Put, sources: Sequence[Tensor], first: int = 0) -> None:
        for name, tensor in self.conversion.apply(sources, first).items():
            self._write(put, name, tensor, tuple(tensor.shape), [0] * tensor.ndim)

    def _write(self, put: Put, name: str, part: Tensor, shape: Sequence[int], start: Sequence[int]) -> None:
        """Write a part of a tensor of this shape that begins at ``start``: as few runs of bytes as it makes."""
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        cut = max((dim for dim, size in enumerate(part.shape) if size != shape[dim]), default=0)
        base = sum(map(math.prod, zip(start, strides, strict=True)))
        data = _bytes(part, self.dtype)
        run = math.prod(part.shape[cut:]) * self.dtype.itemsize
        for number, index in enumerate(product(*map(range, part.shape[:cut]))):
            place = base + sum(map(math.prod, zip(index, strides, strict=False)))
            put(data[number * run : (number + 1) * run], self.layout.places[name] + place * self.dtype.itemsize)


def write_pieces(path: Path, pieces: Iterable[FilePiece], head: bytes = b"") -> None:
    """Write pieces, and its head if given, into a file that exists; OSError if that fails."""
    file = os.open(path, os.O_WRONLY)
    try:
        put = partial(_write_at, file)
        put(head, 0)
        for piece in pieces:
            piece.write(put)
    finally:
        os.close(file)


class SharedFile:
    """A file that ranks write together; if some rank does not see it, all send their pieces to rank 0.

    Every rank makes one, writes its pieces and calls ``complete``. problem: what has gone wrong so far, "" for nothing.
    """

    def __init__(self, path: Path, mark: str, ranks: Ranks | None, channel: Channel | None) -> None:
        """mark: of ``mark_file``, the same on all ranks. ranks, channel: None for one process."""
        self.path, self.mark, self.problem = path, mark, ""
        self.rank, self.world = (0, 1) if ranks is None else (ranks.rank, ranks.world)
        self.blind = ranks is not None and ranks.any(not shows(path, mark))
        self._channel = channel

    def write(self, pieces: Sequence[FilePiece], head: bytes = b"") -> None:
        """Write or send pieces, and the head if given, unless there is a ``problem``; an OSError is kept as one."""
        if self.problem or not (pieces or head):
            return
        try:
            if self.blind and self.rank and self._channel is not None:
                _send(self._channel, self.mark, pieces)
            else:
                write_pieces(self.path, pieces, head)
        except OSError as error:
            self.problem = str(error)

    def complete(self, problem: str = "") -> str:
        """Tell rank 0 that this rank is done; returns there the first problem of any rank, on others their own."""
        problem = self.problem or problem
        if self._channel is not None and self.rank:
            self._channel.send(0, json.dumps([self.mark, problem]).encode())
        elif self._channel is not None:
            for rank in range(1, self.world):
                problem = self._receive(self._channel, rank, problem)
        return problem

    def _receive(self, channel: Channel, rank: int, problem: str) -> str:
        """Write what a rank sends, unless there is a problem already; returns that, or the first of the rank or here.

        What belongs to an earlier file is dropped: it may never have been completed here.
        """
        while True:
            message = channel.receive(rank)
            if message.startswith(b"["):
                of, report = json.loads(message)
                if of == self.mark:
                    return problem or str(report)
            elif message.startswith(self.mark.encode()) and not problem:
                try:
                    with open(self.path, "r+b", buffering=0) as file:
                        at = len(self.mark)
                        while at < len(message):
                            place, size = _PART.unpack_from(message, at)
                            at += _PART.size + size
                            _write_at(file.fileno(), memoryview(message)[at - size : at], place)
                except OSError as error:
                    problem = str(error)


def _send(channel: Channel, mark: str, pieces: Iterable[FilePiece]) -> None:
    message = bytearray()

    def put(data: memoryview | bytes, place: int) -> None:
        for start in range(0, len(data), SENT):
            part = data[start : start + SENT]
            message.extend(_PART.pack(place + start, len(part)))
            message.extend(part)
            if len(message) >= SENT:
                flush()

    def flush() -> None:
        channel.send(0, mark.encode() + message)
        message.clear()

    for piece in pieces:
        piece.write(put)
    flush()


def _write_at(file: int, data: memoryview | bytes, place: int) -> None:
    """Write all of ``data`` from this byte of an open file on; OSError if there is no room."""
    while len(data):
        written = os.pwrite(file, data, place)
        data, place = data[written:], place + written


def mark_file(path: Path) -> tuple[str, OSError | None]:
    """Make a file on rank 0; returns a mark by which the other ranks know that they see it, or what went wrong."""
    mark = uuid.uuid4().hex
    try:
        # The weights that are written may be mapped from the file that was there.
        path.unlink(missing_ok=True)
        path.write_text(mark, encoding="ascii")
    except OSError as error:
        return "", error
    return mark, None


def shows(path: Path, mark: str) -> bool:
    """Return whether this process sees the file that rank 0 marked."""
    try:
        return bool(mark) and path.read_text(encoding="ascii") == mark
    except (OSError, ValueError):
        return False


def whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Gather all of a possibly sharded tensor, in ``dtype``."""
    tensor = tensor.to(dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _apart(conversion: TensorConversion, sources: Sequence[Tensor]) -> bool:
    """Return whether each rank's part of the sources makes parts of the file by itself."""
    if conversion.model is None:
        return True
    cut = (how for source in sources if isinstance(source, DTensor) for how in source.placements)
    return conversion.by_rows and all(how.is_replicate() or cast(Shard, how).dim == 0 for how in cut)


def _gathered_rows(tensor: DTensor, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Yield ``ROWS`` at a time of the rows of which this rank has parts, whole, each with the number of the first.

    All ranks that have parts of the same rows must go through them at the same time.
    """
    named = zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True)
    across = [(name, how) for name, how in named if _in_row(how)]
    mesh, local = tensor.device_mesh[tuple(name for name, _ in across)], tensor.to_local()
    for start, stop, first in sorted(
        {(own[0].start, own[0].stop, there[0].start) for own, there in own_blocks(tensor)}
    ):
        for row in range(start, stop, ROWS):
            part = local[row : min(row + ROWS, stop)].to(dtype)
            shape = torch.Size([len(part), *tensor.shape[1:]])
            stride = torch.empty(shape, device="meta").stride()
            whole_rows = DTensor.from_local(part, mesh, [how for _, how in across], shape=shape, stride=stride)
            yield first + row - start, whole_rows.full_tensor()


def _writes(tensor: Tensor, rank: int, gathered: bool = False) -> bool:
    """Return whether this rank writes its part: of several that hold the same, one does. gathered: see above."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    # Of several meshes that hold the same, that of rank 0 writes.
    places = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True)
    others = (how for place, how in places if place)
    same = (how.is_replicate() or (gathered and _in_row(how)) for how in others)
    return 0 in tensor.device_mesh.mesh and not any(same)


def _in_row(how: Placement) -> bool:
    return not how.is_replicate() and cast(Shard, how).dim != 0


def _bytes(tensor: Tensor, dtype: torch.dtype) -> memoryview:
    """Return a tensor's elements in main memory; the current stream of a GPU is waited for."""
    tensor = tensor.to(dtype).contiguous()
    if tensor.device.type != "cpu":
        # PyTorch keeps pinned memory for the next.
        host = torch.empty(tensor.shape, dtype=dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        torch.accelerator.current_stream(tensor.device).synchronize()
        tensor = host
    # Memory that ``numpy`` has seen can't be freed any more, as it must be when the state moves off its device.
    return np.from_dlpack(tensor.view(-1).view(torch.uint8)).data if tensor.numel() else memoryview(b"")
