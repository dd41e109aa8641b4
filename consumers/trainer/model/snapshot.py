"""Weights to publish go into their file while the next step computes: each rank writes its parts of every tensor.

No rank has more than its parts and a copy of a piece of one of them in the wire dtype. If some rank does not see the
folder, all send their pieces to rank 0. Only what makes no part of the file by itself is gathered, one tensor at a
time: experts whose layers are cut over ranks of tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from consumers.trainer.distributed.ranks import Ranks, reshard
from consumers.trainer.model.file_layout import FileLayout, FilePiece, SharedFile, mark_file
from consumers.trainer.model.hf_weights import file_layout, wire_weights
from consumers.trainer.model.policy import Policy
from schemas.errors import InfraError
from schemas.messages import TensorSpec

COPY_DEADLINE_S = 600.0
"""Seconds that the optimizer waits until the weights that it is about to change are written."""


class Snapshot:
    """Weights of one moment on their way into a file, which ``fill`` completes, perhaps in another thread.

    Training may continue meanwhile, but weights may change only after ``wait``. specs: names, dtypes and shapes, in the
    order of the file.
    """

    def __init__(self, file: SharedFile, layout: FileLayout, pieces: Sequence[FilePiece]) -> None:
        self.specs: list[TensorSpec] = layout.specs
        self._file, self._layout, self._pieces = file, layout, pieces
        self._released = threading.Event()
        source = pieces[0].sources[0] if pieces else torch.empty(0)
        self._device = source.device
        # What the step's kernels have still to do comes before the copy.
        on_cpu = self._device.type == "cpu"
        self._ready = None if on_cpu else torch.accelerator.current_stream(self._device).record_event()

    def fill(self) -> None:
        """Write this rank's parts; then ``wait`` returns, also if that fails.

        On rank 0 the file is complete when this returns, or else deleted. OSError if some rank cannot write it.
        """
        failure: Exception | None = None
        try:
            with ExitStack() as stack:
                if self._ready is not None:
                    stack.enter_context(torch.Stream(self._device)).wait_event(self._ready)
                self._file.write(self._pieces, b"" if self._file.rank else self._layout.head)
        except RuntimeError as error:
            failure = error
        finally:
            self._pieces = ()
            self._released.set()
        # Rank 0 waits for what the others say, whatever it is.
        problem = self._file.complete("" if failure is None else str(failure) or type(failure).__name__)
        if problem and not self._file.rank:
            self._file.path.unlink(missing_ok=True)
            raise failure or OSError(problem)

    def wait(self) -> None:
        """Wait until the weights may change; InfraError after the deadline."""
        if not self._released.wait(COPY_DEADLINE_S):
            raise InfraError(f"the weights were not written within {COPY_DEADLINE_S:.0f} s")


class Snapshots:
    """Takes snapshots of a policy. ranks: that hold parts of it and must all call ``take``; None for this one alone."""

    def __init__(self, policy: Policy, dtype: str, ranks: Ranks | None = None) -> None:
        self._policy = policy
        self._dtype = dtype
        self._ranks = ranks if ranks is not None and ranks.world > 1 else None
        self._channel = None if self._ranks is None else self._ranks.snapshot_channel
        self._layout: FileLayout | None = None

    @staticmethod
    def create(path: Path) -> str:
        """Make the file on rank 0, and return a mark by which other ranks know that they see the same; OSError."""
        mark, problem = mark_file(path)
        if problem is not None:
            raise problem
        return mark

    @torch.no_grad()
    def take(self, path: Path, mark: str | None = None) -> Snapshot:
        """Take the weights for ``path``, copying only gathered ones. mark: what ``create`` returned, if called."""
        mark = self.create(path) if mark is None else mark
        reshard(self._policy)
        layout = self._layout = self._layout or file_layout(self._policy, self._dtype)
        weights = dict(wire_weights(self._policy))
        file, later = SharedFile(path, mark, self._ranks, self._channel), []
        for piece in layout.pieces(weights.__getitem__, file):
            if piece.gathered:
                file.write([piece])
            else:
                later.append(piece)
        return Snapshot(file, layout, later)
