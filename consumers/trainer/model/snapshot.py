"""Weights to publish are copied to host memory while the next step computes, and written to a file from there.

Parameters are copied one by one, in the wire dtype, into one buffer that becomes the safetensors file. The buffer is
used again for every version. On the device, memory is needed for a copy of the largest parameter.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from consumers.trainer.distributed.ranks import local_part
from consumers.trainer.model.file_layout import TensorConversion
from consumers.trainer.model.hf_weights import FileLayout, file_layout, header, whole, wire_weights
from consumers.trainer.model.policy import DTYPES, Policy
from schemas.digests import CHUNK_BYTES, digest
from schemas.errors import InfraError
from schemas.messages import TensorSpec

COPY_DEADLINE_S = 600.0
"""Seconds that the optimizer waits for the copy of the weights that it is about to change."""


@dataclass(frozen=True)
class Copy:
    """Tensors of a policy, whole, and the views of the file's image that they are converted and copied to."""

    conversion: TensorConversion
    sources: Sequence[Tensor]
    views: Sequence[Tensor]

    def run(self) -> None:
        """Copy on the current stream; the image may not be filled yet when it returns."""
        for view, made in zip(self.views, self.conversion.apply(self.sources), strict=True):
            view.copy_(made, non_blocking=True)


class Snapshot:
    """Weights of one moment, copied by ``fill`` and then written; both may run in another thread than ``wait``::

        snapshot = snapshots.take()
        thread.submit(lambda: (snapshot.fill(), snapshot.write(path)))
        ...                     # forward and backward
        snapshot.wait()         # now the weights may change

    specs: names, dtypes and shapes, in the order of the file.
    """

    def __init__(self, layout: FileLayout, image: Tensor, copies: Sequence[Copy]) -> None:
        """Make a snapshot. image: uint8 [bytes of the file]. copies: what ``fill`` has to do."""
        self.specs = layout.specs
        self._image = image
        self._copies = copies
        self._filled = not copies
        self._released = threading.Event()
        if self._filled:
            self._released.set()
        source = copies[0].sources[0] if copies else image
        self._device = source.device
        self._ready = torch.cuda.Event() if source.is_cuda else None
        if self._ready is not None:
            # What the step's kernels have still to do comes before the copy.
            self._ready.record(torch.cuda.current_stream(self._device))

    @torch.no_grad()
    def fill(self) -> None:
        """Copy the weights that are not copied yet; then ``wait`` returns, also if the copy fails."""
        try:
            if self._ready is None:
                self._copy()
            else:
                stream = torch.cuda.Stream(self._device)
                with torch.cuda.stream(stream):
                    stream.wait_event(self._ready)
                    self._copy()
                stream.synchronize()
            self._filled |= bool(self._copies)
        finally:
            self._copies = ()
            self._released.set()

    def _copy(self) -> None:
        for copy in self._copies:
            copy.run()

    def wait(self) -> None:
        """Wait until the weights may change; InfraError after the deadline."""
        if not self._released.wait(COPY_DEADLINE_S):
            raise InfraError(f"the weights were not copied to host memory within {COPY_DEADLINE_S:.0f} s")

    def write(self, path: Path) -> list[str]:
        """Write the file, whole or not at all; returns the digest of each of its chunks.

        OSError if it can't be written; RuntimeError if ``fill`` has not copied the weights.
        """
        if not self._filled:
            raise RuntimeError("a snapshot can't be written before fill() has copied its weights")
        image = memoryview(self._image.numpy().data)
        chunks = [image[start : start + CHUNK_BYTES] for start in range(0, len(image), CHUNK_BYTES)]
        try:
            # Both leave the interpreter free: a chunk is hashed while another is written.
            with ThreadPoolExecutor(1, thread_name_prefix="digests") as hashing, path.open("wb") as file:
                digests = hashing.map(digest, chunks)
                for chunk in chunks:
                    file.write(chunk)
                return list(digests)
        except OSError:
            path.unlink(missing_ok=True)
            raise


class Snapshots:
    """Takes snapshots of a policy, one at a time: a new one overwrites the last.

    sharded: whether several ranks hold parts of the policy; all of them must call ``take``. main: whether this rank
    keeps the whole weights that are gathered then.
    """

    def __init__(self, policy: Policy, dtype: str, *, main: bool = True, sharded: bool = False) -> None:
        self._policy = policy
        self._dtype = dtype
        self._main = main
        self._sharded = sharded
        self._image: Tensor | None = None
        self._layout: FileLayout | None = None

    @torch.no_grad()
    def take(self) -> Snapshot:
        """Take the current weights.

        A single process copies nothing here: ``Snapshot.fill`` does. Parts on several ranks are gathered here, one
        parameter at a time.
        """
        for module in self._policy.modules():
            if isinstance(module, FSDPModule):
                # A forward without backward leaves gathered parameters behind, which the next step would free.
                module.reshard()
        layout = self._layout = self._layout or file_layout(self._policy, self._dtype)
        weights = dict(wire_weights(self._policy))
        keeps = self._main or not self._sharded
        image = self._buffer(layout.specs) if keeps else torch.empty(0, dtype=torch.uint8)
        views = self._views(image, layout.specs) if keeps else iter(())
        copies = []
        for conversion in layout.conversions:
            if self._sharded:
                sources = [whole(weights[name], layout.dtypes[name]) for name in conversion.sources]
            else:
                # A module's parameter is replaced by its gathered form while the step computes; its one part stays.
                sources = [local_part(weights[name]) for name in conversion.sources]
            if keeps:
                copies.append(Copy(conversion, sources, list(islice(views, len(conversion.shapes)))))
            if self._sharded and copies:
                copies.pop().run()
        return Snapshot(layout, image, copies)

    def _buffer(self, specs: Sequence[TensorSpec]) -> Tensor:
        """Return the buffer for a file, with the file's head in it: uint8 [bytes], pinned for weights on a GPU."""
        head = header(specs)
        size = len(head) + sum(torch.Size(spec.shape).numel() * DTYPES[spec.dtype].itemsize for spec in specs)
        if self._image is None or len(self._image) != size:
            self._image = torch.empty(size, dtype=torch.uint8, pin_memory=self._policy.device.type == "cuda")
        self._image[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        return self._image

    def _views(self, image: Tensor, specs: Sequence[TensorSpec]) -> Iterator[Tensor]:
        """Yield each tensor's place in the image."""
        start = len(header(specs))
        for spec in specs:
            dtype, shape = DTYPES[spec.dtype], torch.Size(spec.shape)
            end = start + shape.numel() * dtype.itemsize
            yield image[start:end].view(dtype).view(shape)
            start = end
