"""Exact additions such as ``12+34=``: a task a tiny model learns in minutes, with an honest held-out set.

Train and held-out pairs are disjoint and depend on ``max``, ``heldout_fraction`` and ``seed`` only.
"""

from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from producers.datasets.base import Example, check_index
from schemas.errors import ConfigError


class Arithmetic:
    """All pairs of operands 0 to ``max``, ``(max + 1)**2`` in both splits together, in a scattered order
    so that the first so many are a fair sample. The prompt is text, ``data["answer"]`` the sum."""

    def __init__(
        self,
        max: Annotated[int, Field(ge=1, le=2999)] = 99,
        split: Literal["train", "heldout"] = "train",
        heldout_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1,
        seed: Annotated[int, Field(ge=0)] = 0,
    ) -> None:
        self._side = max + 1
        draws = _uniform(np.arange(self._side**2, dtype=np.uint64), seed)
        held_out = draws < heldout_fraction
        chosen = np.flatnonzero(held_out if split == "heldout" else ~held_out)
        if not chosen.size:
            raise ConfigError(f"arithmetic: max {max} and heldout_fraction {heldout_fraction} leave {split} empty")
        self._pairs = chosen[np.argsort(draws[chosen], kind="stable")].astype(np.int32)

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> Example:
        check_index(self, index)
        a, b = divmod(int(self._pairs[index]), self._side)
        return Example(text=f"{a}+{b}=", data={"answer": str(a + b)})


def _uniform(values: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.float64]:
    """Return a fixed pseudo-random number in [0, 1) for each value (SplitMix64: Steele et al. 2014)."""
    step = 0x9E3779B97F4A7C15
    state = values + np.uint64((seed + 1) * step % 2**64)
    state *= np.uint64(step)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)).astype(np.float64) / 2.0**53
