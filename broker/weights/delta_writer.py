"""The trainer's copy of the state that it published last, against which it writes the next version's delta.

The last state stays as a file beside the new one; both are mapped, and compared block by block.
"""

import math
import os
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from broker.flow.fencing import term_number
from broker.weights.delta import Extent, write_delta
from schemas.digests import state_digest
from schemas.messages import Manifest, TensorSpec

PAYS = 0.5
"""Largest size of a useful delta, as a share of the state: a reader also needs time to apply and check it."""
WIDTHS = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2}
WIDTHS |= {"float8_e4m3fn": 1, "float8_e5m2": 1}
"""Bytes of an element."""


class DeltaWriter:
    """Writes deltas: ``make_delta`` for a file, ``keep_base`` before it is consumed, ``confirm_base`` once published.

    max_chain: most deltas that a new reader applies after a whole version.
    """

    def __init__(self, folder: Path, max_chain: int) -> None:
        self._folder = folder
        self.max_chain = max_chain
        self._rests = 0
        """Number of versions for which no delta is tried, after one that did not pay."""
        self._digest: str | None = None
        self._leader_term = -1

    def make_delta(
        self, file: Path, tensors: Sequence[TensorSpec], published: Sequence[Manifest], leader_term: str
    ) -> tuple[Path, Manifest] | None:
        """Write the delta from the newest version to ``file``; return path and base, None if it does not pay."""
        if (term := term_number(leader_term)) != self._leader_term:
            # The files of another leader term are forgotten.
            self._leader_term, self._digest, self._rests = term, None, 0
        if self._rests:
            self._rests -= 1
            return None
        base = published[-1] if published else None
        if base is None or self._digest is None or state_digest(base.state.chunks) != self._digest:
            return None
        out = self._file("delta")
        if self._write(file, tensors, out):
            return out, base
        out.unlink(missing_ok=True)
        self._rests = self.max_chain
        return None

    def keep_base(self, file: Path) -> None:
        """Link ``file`` under a second name, if the next version may be a delta against it."""
        copy = self._file("next")
        copy.unlink(missing_ok=True)
        if self._rests:
            return
        try:
            os.link(file, copy)
        except OSError:
            # Not every file system supports links.
            shutil.copyfile(file, copy)

    def confirm_base(self, chunk_digests: Sequence[str]) -> None:
        """Make the file of ``keep_base``, now published, the base of the next delta."""
        if self._rests:
            self._file("base").unlink(missing_ok=True)
            self._digest = None
        else:
            os.replace(self._file("next"), self._file("base"))
            self._digest = state_digest(chunk_digests)

    def _file(self, name: str) -> Path:
        # A replaced trainer that still runs for a moment must not touch its successor's files.
        return self._folder / f"{name}-t{self._leader_term}"

    def _write(self, file: Path, tensors: Sequence[TensorSpec], out: Path) -> bool:
        base = self._file("base")
        if base.stat().st_size != file.stat().st_size:
            return False
        old, new = (np.memmap(path, np.uint8, mode="r") for path in (base, file))
        head = 8 + int.from_bytes(new[:8].tobytes(), "little")
        extents = extents_of(tensors, head)
        if extents is None or extents[-1].stop != len(new) or not np.array_equal(old[:head], new[:head]):
            return False
        with out.open("wb") as stream:
            return write_delta(old, new, extents, stream, limit=int(PAYS * len(new))) is not None


def extents_of(tensors: Sequence[TensorSpec], head: int) -> list[Extent] | None:
    """Return where the tensors lie in a safetensors file that has them in this order after ``head`` bytes.

    None if there are no tensors, or if the width of a dtype is unknown.
    """
    if not tensors or any(spec.dtype not in WIDTHS for spec in tensors):
        return None
    ends = [head]
    for spec in tensors:
        ends.append(ends[-1] + math.prod(spec.shape) * WIDTHS[spec.dtype])
    return [
        Extent(start, stop, WIDTHS[spec.dtype]) for (start, stop), spec in zip(pairwise(ends), tensors, strict=True)
    ]
