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

WORTH_IT = 0.1
"""Least share of a micro-batch's tokens that must be saved: handing them to attention again costs, too."""


@dataclass(frozen=True)
class RowFamily:
    """Rows by index, those with the longest common beginning side by side.

    common: of each row but the first, how many tokens of it and of the one before need to be computed only once. read:
    tokens of each row that a model reads: the last one predicts nothing.
    """

    rows: list[int]
    common: list[int]
    read: list[int]

    @property
    def shared(self) -> int:
        """Tokens that need not be computed when all rows are in one micro-batch."""
        return sum(self.common)

    def halves(self) -> list[RowFamily]:
        """Two families with half of the rows each; itself if it has one row."""
        middle = len(self.rows) // 2
        if not middle:
            return [self]
        return [
            RowFamily(self.rows[:middle], self.common[: middle - 1], self.read[:middle]),
            RowFamily(self.rows[middle:], self.common[middle:], self.read[middle:]),
        ]


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
        family, length, common = [ordered[0]], len(tokens[ordered[0]]), list[int]()
        for before, row in pairwise(ordered):
            shared = _common_prefix(tokens[before], tokens[row])
            if not shared or length + len(tokens[row]) > most:
                families.append(_family(family, common, tokens))
                family, length, common = [], 0, []
            else:
                common.append(shared)
            family.append(row)
            length += len(tokens[row])
        families.append(_family(family, common, tokens))
    return families


def _family(rows: list[int], common: list[int], tokens: Sequence[npt.NDArray[np.int32]]) -> RowFamily:
    return RowFamily(rows, common, [len(tokens[row]) - 1 for row in rows])


def count_shared(families: Sequence[RowFamily], micro_batches: Sequence[Sequence[int]]) -> list[int]:
    """Tokens that each micro-batch need not compute: of rows of one family, whether all of it are there or some.

    0 where they are less than WORTH_IT of those that it reads: the model then computes each for itself.
    """
    places = {row: (f, place) for f, family in enumerate(families) for place, row in enumerate(family.rows)}
    found = []
    for rows in micro_batches:
        there = sorted(places[row] for row in rows if row in places)
        shared = sum(min(families[f].common[here:next_]) for (f, here), (g, next_) in pairwise(there) if f == g)
        read = sum(families[f].read[place] for f, place in there)
        found.append(shared if shared >= WORTH_IT * read else 0)
    return found


def _common_prefix(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """Tokens that both begin with, of those that a model reads: the last one of a row predicts nothing."""
    end = min(len(one), len(other)) - 1
    differ = one[:end] != other[:end]
    return int(differ.argmax()) if differ.any() else max(0, end)
