"""Load balancing: rows are dealt to ranks and their micro-batches, by pure functions over lengths.

Every rank gets as many micro-batches as the others, and those that run at the same time cost about the same: sharded
ranks wait for each other at every layer. The same input gives the same plan, so a replay is exact.

Rows of one group that begin alike are a family, which costs less in one micro-batch: what they begin with, a prompt or
a conversation so far, is computed once for all rows of a micro-batch (model/packing.py).
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Shares: TypeAlias = list[list[list[int]]]
REFINEMENTS = 200
"""Most exchanges between the fullest bin and the emptiest one; each brings them nearer to each other."""
WORTH_IT = 0.1
"""Least share of a micro-batch's tokens that must be saved: handing them to attention again costs, too."""


@dataclass(frozen=True)
class Cost:
    """Work of training one row of T tokens, L of them loss tokens: token*T + square*T^2 + loss*L."""

    token: float = 1.0
    square: float = 0.0
    loss: float = 0.0

    def of(self, tokens: int, loss_tokens: int) -> float:
        """Return the work in the unit of the coefficients: floating-point operations if they are a model's."""
        return self.token * tokens + self.square * tokens * tokens + self.loss * loss_tokens


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
        """Tokens that need not be computed if all rows are in one micro-batch."""
        return sum(self.common)

    def halves(self) -> list[RowFamily]:
        """Split into two families with half of the rows each; itself if it has one row."""
        middle = len(self.rows) // 2
        if not middle:
            return [self]
        return [
            RowFamily(self.rows[:middle], self.common[: middle - 1], self.read[:middle]),
            RowFamily(self.rows[middle:], self.common[middle:], self.read[middle:]),
        ]


def shares(
    costs: Sequence[float], lengths: Sequence[int], dp_size: int, max_tokens: int, *, packed: bool = True
) -> Shares:
    """Return the indices of the rows of each rank's micro-batches: ``[rank][micro-batch][...]``, as many for each rank.

    lengths: tokens. max_tokens: most tokens of a micro-batch, padding included unless they are ``packed``; a longer
    row gets a micro-batch of its own. A micro-batch may be empty if there are few rows.
    """
    if packed:
        bins = _packed(costs, lengths, dp_size, max_tokens)
    else:
        bins = list(_padded(lengths, min(max_tokens, -(-sum(lengths) // dp_size))))
    bins = [items for items in bins if items] or [[]]
    bins += [[]] * (-len(bins) % dp_size)
    total = [sum(costs[item] for item in items) for items in bins]
    order = sorted(range(len(bins)), key=lambda b: (-total[b], b))
    dealt: Shares = [[] for _ in range(dp_size)]
    load = [0.0] * dp_size
    for first in range(0, len(bins), dp_size):
        # Neighbours in size run at the same time; the rank with the least work gets the largest.
        ranks = sorted(range(dp_size), key=lambda rank: (load[rank], rank))
        for rank, b in zip(ranks, order[first : first + dp_size], strict=True):
            dealt[rank].append(bins[b])
            load[rank] += total[b]
    return dealt


def shares_of_families(
    costs: Sequence[float],
    lengths: Sequence[int],
    dp_size: int,
    max_tokens: int,
    families: Sequence[RowFamily],
    token: float,
) -> Shares:
    """Deal packed rows; families or their halves stay together if that is faster. token: cost of a shared token."""

    def whole(parts: Sequence[RowFamily]) -> Shares:
        dealt = shares(
            [sum(costs[row] for row in part.rows) - token * part.shared for part in parts],
            [sum(lengths[row] for row in part.rows) for part in parts],
            dp_size,
            max_tokens,
        )
        return [
            [
                sorted((row for p in found for row in parts[p].rows), key=lambda row: (lengths[row], row))
                for found in micro_batches
            ]
            for micro_batches in dealt
        ]

    halves = [half for family in families for half in family.halves()]
    plans = (whole(families), whole(halves), shares(costs, lengths, dp_size, max_tokens))
    # Sharded ranks wait for each other in every micro-batch, so that the slowest one of each counts.
    return min(
        plans, key=lambda dealt: sum(max(each) for each in zip(*work(dealt, costs, families, token), strict=True))
    )


def work(
    dealt: Shares, costs: Sequence[float], families: Sequence[RowFamily] = (), token: float = 0.0
) -> list[list[float]]:
    """Return the work of each micro-batch of each rank, without the tokens that rows of a family share in one."""
    shared = iter(count_shared(families, [rows for micro_batches in dealt for rows in micro_batches]))
    return [
        [sum(costs[row] for row in rows) - token * next(shared) for rows in micro_batches] for micro_batches in dealt
    ]


def _packed(costs: Sequence[float], lengths: Sequence[int], dp_size: int, max_tokens: int) -> list[list[int]]:
    """Pack rows into as few bins as hold all tokens, or a few more where no cut fits."""
    needed = sum(min(length, max_tokens) for length in lengths)
    micro_batches = max(1, math.ceil(needed / (max_tokens * dp_size)))
    while True:
        bins = partition(costs, lengths, dp_size * micro_batches, max_tokens)
        if bins is not None:
            return bins
        micro_batches += 1 + micro_batches // 16


def _padded(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield bins of rows, shortest first, with rows times the longest within ``max_tokens``."""
    rows: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda s: (lengths[s], s)):
        if rows and (len(rows) + 1) * lengths[row] > max_tokens:
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows


def partition(costs: Sequence[float], lengths: Sequence[int], bins: int, max_tokens: int) -> list[list[int]] | None:
    """Partition indices of ``costs`` into ``bins`` bins of about equal cost; None if they need more bins.

    lengths: tokens of each item; a bin takes at most ``max_tokens`` of them, or one item that is longer than that.
    Longest processing time first (Graham, SIAM J. Appl. Math. 17, 1969), then exchanges between the
    fullest and the emptiest bin.
    """
    found: list[list[int]] = [[] for _ in range(bins)]
    tokens, sums = [0] * bins, [0.0] * bins
    shortest = min(lengths, default=0)
    open_bins = [(0.0, b) for b in range(bins)]
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        passed: list[tuple[float, int]] = []
        while open_bins:
            total, b = heapq.heappop(open_bins)
            if not found[b] or tokens[b] + lengths[item] <= max_tokens:
                break
            if tokens[b] + shortest <= max_tokens:
                passed.append((total, b))
        else:
            return None
        found[b].append(item)
        tokens[b] += lengths[item]
        sums[b] = total + costs[item]
        for entry in (*passed, (sums[b], b)):
            heapq.heappush(open_bins, entry)
    _refine(found, sums, tokens, costs, lengths, max_tokens)
    # By length: attention on a CPU takes neighbours of one length in one call (model/packing.py).
    return [sorted(items, key=lambda item: (lengths[item], item)) for items in found]


def _refine(
    found: list[list[int]],
    sums: list[float],
    tokens: list[int],
    costs: Sequence[float],
    lengths: Sequence[int],
    max_tokens: int,
) -> None:
    for _ in range(REFINEMENTS):
        high = max(range(len(found)), key=sums.__getitem__)
        low = min(range(len(found)), key=sums.__getitem__)
        gap = sums[high] - sums[low]
        others = sorted(found[low], key=lambda item: (costs[item], item))
        other_costs = [costs[item] for item in others]
        best: tuple[float, int, int | None] | None = None
        for item in found[high]:
            # Both come out equal when half of the gap moves: by itself, or against what is lighter by that.
            at = bisect_left(other_costs, costs[item] - gap / 2)
            for other in (None, *others[max(0, at - 1) : at + 1]):
                moved = costs[item] - (0.0 if other is None else costs[other])
                shift = lengths[item] - (0 if other is None else lengths[other])
                fits = tokens[low] + shift <= max_tokens and tokens[high] - shift <= max_tokens
                off = abs(gap / 2 - moved)
                if fits and (best is None or off < best[0]):
                    best = (off, item, other)
        if best is None or best[0] >= gap / 2 * (1 - 1e-9):
            return
        _, item, other = best
        for source, target, moving in ((high, low, item), (low, high, other)):
            if moving is not None:
                found[source].remove(moving)
                found[target].append(moving)
                sums[source] -= costs[moving]
                sums[target] += costs[moving]
                tokens[source] -= lengths[moving]
                tokens[target] += lengths[moving]


def find_families(tokens: Sequence[npt.NDArray[np.int32]], groups: Sequence[int], most: int) -> list[RowFamily]:
    """Put rows into families of at most ``most`` tokens. tokens: int32 [L] of each row. groups: each row's group."""
    members = defaultdict(list)
    for row, group in enumerate(groups):
        members[group].append(row)
    found: list[tuple[list[int], list[int]]] = []
    for rows in members.values():
        # Rows with the longest common prefix are neighbours in this order.
        ordered = sorted(rows, key=lambda row: tokens[row].tobytes())
        family, length, common = [ordered[0]], len(tokens[ordered[0]]), list[int]()
        for before, row in pairwise(ordered):
            shared = _common_prefix(tokens[before], tokens[row])
            if not shared or length + len(tokens[row]) > most:
                found.append((family, common))
                family, length, common = [], 0, []
            else:
                common.append(shared)
            family.append(row)
            length += len(tokens[row])
        found.append((family, common))
    return [RowFamily(rows, common, [len(tokens[row]) - 1 for row in rows]) for rows, common in found]


def count_shared(families: Sequence[RowFamily], micro_batches: Sequence[Sequence[int]]) -> list[int]:
    """Count the tokens that each micro-batch need not compute, because its rows of one family share them.

    The count is 0 if it is below WORTH_IT of the tokens read: the model then computes each row by itself.
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
    """Count the tokens that both begin with, without the last one of a row, which a model does not read."""
    end = min(len(one), len(other)) - 1
    differ = one[:end] != other[:end]
    return int(differ.argmax()) if differ.any() else max(0, end)
