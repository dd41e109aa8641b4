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
    """Rows by index, those with the longest common beginning side by side.

    common: of each row but the first, how many tokens of it and of the one before need to be computed only once.
    """

    rows: list[int]
    common: list[int]

    @property
    def shared(self) -> int:
        """Tokens that need not be computed when all rows are in one micro-batch."""
        return sum(self.common)


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
        family, length, shared = [ordered[0]], len(tokens[ordered[0]]), list[int]()
        for before, row in pairwise(ordered):
            common = _common_prefix(tokens[before], tokens[row])
            if not common or length + len(tokens[row]) > most:
                families.append(RowFamily(family, shared))
                family, length, shared = [], 0, []
            else:
                shared.append(common)
            family.append(row)
            length += len(tokens[row])
        families.append(RowFamily(family, shared))
    return families


def count_shared(families: Sequence[RowFamily], micro_batches: Sequence[Sequence[int]]) -> list[int]:
    """Tokens that each micro-batch need not compute: of rows of one family, whether all of it are there or some."""
    places = {row: (f, place) for f, family in enumerate(families) for place, row in enumerate(family.rows)}
    found = []
    for rows in micro_batches:
        there = pairwise(sorted(places[row] for row in rows if row in places))
        found.append(sum(min(families[f].common[here:next_]) for (f, here), (g, next_) in there if f == g))
    return found


def _common_prefix(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """Tokens that both begin with, of those that a model reads: the last one of a row predicts nothing."""
    end = min(len(one), len(other)) - 1
    differ = one[:end] != other[:end]
    return int(differ.argmax()) if differ.any() else max(0, end)
