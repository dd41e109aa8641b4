"""Weights to publish go into their file while the next step computes: each rank writes its parts of every tensor.

No rank has more than its parts and a copy of one of them in the wire dtype. Only what makes no part of the file by
itself is gathered, one tensor at a time: experts whose layers are cut over ranks of tensor, and everything if some rank
does not see the folder.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from consumers.trainer.distributed.channel import Channel
from consumers.trainer.distributed.ranks import Ranks, reshard
from consumers.trainer.model.file_layout import FileLayout, Piece, mark_file, shows, write_pieces
from consumers.trainer.model.hf_weights import file_layout, wire_weights
from consumers.trainer.model.policy import Policy
from schemas.errors import InfraError
from schemas.messages import TensorSpec

COPY_DEADLINE_S = 600.0
"""Seconds that the optimizer waits until the weights that it is about to change are written."""


class Snapshot:
    """Weights of one moment on their way into a file, which ``fill`` completes, perhaps in another thread::

        snapshot = snapshots.take(path)
        thread.submit(snapshot.fill)
        ...                     # forward and backward
        snapshot.wait()         # now the weights may change

    specs: names, dtypes and shapes, in the order of the file.
    """

    def __init__(self, path: Path, layout: FileLayout, pieces: Sequence[Piece], report: _Report) -> None:
        """Make a snapshot. pieces: what ``fill`` has to write. report: of all ranks on it."""
        self.specs: list[TensorSpec] = layout.specs
        self._path, self._layout, self._report = path, layout, report
        self._pieces = pieces
        self._released = threading.Event()
        source = pieces[0].sources[0] if pieces else torch.empty(0)
        self._device = source.device
        self._ready = torch.cuda.Event() if source.is_cuda else None
        if self._ready is not None:
            # What the step's kernels have still to do comes before the copy.
            self._ready.record(torch.cuda.current_stream(self._device))

    def fill(self) -> None:
        """Write this rank's parts; then ``wait`` returns, also if that fails.

        On rank 0 the file is complete when this returns, or else deleted. OSError if some rank cannot write it.
        """
        failure: Exception | None = None
        try:
            if self._ready is None:
                self._copy()
            else:
                stream = torch.cuda.Stream(self._device)
                with torch.cuda.stream(stream):
                    stream.wait_event(self._ready)
                    self._copy()
        except (OSError, RuntimeError) as error:
            failure = error
        finally:
            self._pieces = ()
            self._released.set()
        # Rank 0 waits for what the others say, whatever it is.
        if problem := self._report.complete("" if failure is None else str(failure) or type(failure).__name__):
            self._path.unlink(missing_ok=True)
            raise failure or OSError(problem)

    def _copy(self) -> None:
        if self._report.main:
            write_pieces(self._path, self._pieces, self._layout.head)
        elif self._pieces:
            write_pieces(self._path, self._pieces)

    def wait(self) -> None:
        """Wait until the weights may change; InfraError after the deadline."""
        if not self._released.wait(COPY_DEADLINE_S):
            raise InfraError(f"the weights were not written within {COPY_DEADLINE_S:.0f} s")


class _Report:
    """How the writing of a file ended on all ranks. mark: of this file."""

    def __init__(self, ranks: Ranks | None, channel: Channel | None, mark: str) -> None:
        self._ranks, self._channel, self._mark = ranks, channel, mark
        self.main = ranks is None or ranks.is_main
        self.problem = ""
        """What went wrong before ``complete``."""

    def complete(self, problem: str) -> str:
        """Tell rank 0 this rank's problem, "" for none; returns on rank 0 the first of any rank, on others nothing."""
        problem = self.problem or problem
        if self._ranks is None or self._channel is None:
            return problem
        if not self.main:
            self._channel.send(0, json.dumps([self._mark, problem]).encode())
            return ""
        for rank in range(1, self._ranks.world):
            mark, other = "", ""
            # A file that was never completed here may have been on another rank.
            while mark != self._mark:
                mark, other = json.loads(self._channel.receive(rank))
            problem = problem or other
        return problem


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
        """Take the current weights, for the file ``path``. mark: that of ``create``, called before if not given.

        Nothing is copied here unless it must be gathered.
        """
        mark = self.create(path) if mark is None else mark
        reshard(self._policy)
        layout = self._layout = self._layout or file_layout(self._policy, self._dtype)
        weights = dict(wire_weights(self._policy))
        ranks, report = self._ranks, _Report(self._ranks, self._channel, mark)
        rank, world = (0, 1) if ranks is None else (ranks.rank, ranks.world)
        blind = ranks is not None and ranks.any(not shows(path, mark))
        later = []
        for piece in layout.pieces(weights.__getitem__, rank, world, blind):
            if not piece.gathered:
                later.append(piece)
            elif not report.problem:
                try:
                    write_pieces(path, [piece])
                except OSError as error:
                    report.problem = str(error)
        return Snapshot(path, layout, later, report)
