"""Families: rows of one group that begin alike, which cost less in one micro-batch than apart.

What they begin with, a prompt or a conversation so far, is computed once for all rows of a micro-batch
(model/shared_prefixes.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class RowFamily:
    """Rows by index, and how many of their tokens need not be computed when they are in one micro-batch."""

    rows: list[int]
    shared: int


def find_families(tokens: Sequence[npt.NDArray[np.int32]], groups: Sequence[int], most: int) -> list[RowFamily]:
    """Deal all rows to families of at most ``most`` tokens; a row that begins like no other is one by itself.

    tokens: int32 [L] of each row. groups: index of the group of each row.
    """
    members = defaultdict(list)
    for row, group in enumerate(groups):
        members[group].append(row)
    families: list[RowFamily] = []
    for rows in members.values():
        # Rows with the longest common prefix are neighbours in this order.
        ordered = sorted(rows, key=lambda row: tokens[row].tobytes())
        family, length, shared = [ordered[0]], len(tokens[ordered[0]]), 0
        for before, row in pairwise(ordered):
            common = _common_prefix(tokens[before], tokens[row])
            if not common or length + len(tokens[row]) > most:
                families.append(RowFamily(family, shared))
                family, length, shared = [], 0, 0
            else:
                shared += common
            family.append(row)
            length += len(tokens[row])
        families.append(RowFamily(family, shared))
    return families


def _common_prefix(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """Tokens that both begin with, of those that a model reads: the last one of a row predicts nothing."""
    end = min(len(one), len(other)) - 1
    differ = one[:end] != other[:end]
    return int(differ.argmax()) if differ.any() else max(0, end)
