"""Several datasets in one deterministic order: a position becomes a dataset and an example of it.

Positions come in cycles. In each, every dataset has a number of positions in proportion to its weight,
spread evenly, so that each batch has nearly the mixture of the whole; and each dataset goes through its own epochs.
Only the position is state: it tells how far every dataset is, on every machine and after every restart.
"""

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import reduce
from pathlib import Path

from producers.datasets.base import Dataset
from producers.datasets.curriculum import MOST_PROMPTS
from producers.datasets.loading import Measure, build_dataset
from producers.datasets.prompt_order import PromptOrder
from schemas.config import CurriculumConfig, TrainDataset
from schemas.errors import ConfigError

LONGEST_CYCLE = 10_000
"""Most positions of a cycle; weights that would need more are rounded to so many parts."""


@dataclass(frozen=True)
class DatasetPart:
    """A dataset of a mixture, with its label and its weight; or several, which are the levels of one."""

    label: str
    levels: Sequence[Dataset]
    weight: float = 1.0
    shuffle: bool = True
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)


@dataclass(frozen=True)
class PromptRef:
    """A position of the prompt order: example ``index`` of dataset ``part`` at ``level``, in its epoch ``epoch``.

    statistic: the number of the statistic that the outcome of its group counts in.
    """

    part: int
    level: int
    epoch: int
    index: int
    statistic: int


class Mixture:
    """Positions 0, 1, 2, … without end over the datasets of ``parts``.

    The levels of a part take turns. ConfigError when there are more prompts than a curriculum keeps statistics of.
    """

    def __init__(self, parts: Sequence[DatasetPart], seed: int = 0) -> None:
        self.parts = list(parts)
        self._orders = [[PromptOrder(len(level), seed, part.shuffle) for level in part.levels] for part in parts]
        # A curriculum keeps a statistic of each level, or of each prompt where there are no levels.
        sizes = (len(part.levels) if len(part.levels) > 1 else len(part.levels[0]) for part in parts)
        self._first = [0, *itertools.accumulate(sizes)]
        if self._first[-1] > MOST_PROMPTS and any(part.curriculum.name != "uniform" for part in parts):
            raise ConfigError(
                f"train has {self._first[-1]:,} prompts, a curriculum keeps statistics of {MOST_PROMPTS:,} at most: set"
                " train.limit, or train.curriculum.name to uniform"
            )
        self._cycle = spread(whole_shares([part.weight for part in parts]))
        self._positions = [
            [at for at, part in enumerate(self._cycle) if part == number] for number in range(len(parts))
        ]

    def at(self, position: int) -> PromptRef:
        """Return the example at ``position`` (0 or more)."""
        if position < 0:
            raise ValueError(f"position {position} must be 0 or more")
        cycle, at = divmod(position, len(self._cycle))
        part = self._cycle[at]
        positions = self._positions[part]
        own, level = divmod(cycle * len(positions) + bisect.bisect_left(positions, at), len(self._orders[part]))
        epoch, index = self._orders[part][level].at(own)
        counted = index if len(self._orders[part]) == 1 else level
        return PromptRef(part, level, epoch, index, self._first[part] + counted)

    def dataset(self, prompt: PromptRef) -> Dataset:
        """Return the dataset of a prompt."""
        return self.parts[prompt.part].levels[prompt.level]


def build_mixture(datasets: Sequence[TrainDataset], base: Path, seed: int, measure: Measure | None = None) -> Mixture:
    """Build the mixture that the configuration names; ConfigError is one line. measure: see ``build_dataset``."""
    parts = []
    for one in datasets:
        levels = [build_dataset(level, base, measure) for level in one.at_levels()]
        parts.append(DatasetPart(one.label, levels, one.weight, one.shuffle, one.curriculum))
    return Mixture(parts, seed)


def whole_shares(weights: Sequence[float]) -> list[int]:
    """Least whole numbers that stand to each other as ``weights`` do, at least 1 each; nearly, where they are large."""
    # Of its decimals: 0.1 is a tenth, and not the binary fraction next to it.
    exact = [Fraction(str(float(weight))) for weight in weights]
    total = sum(exact, Fraction(0))
    scale = math.lcm(*(share.denominator for share in exact))
    whole = [int(share * scale) for share in exact]
    if sum(whole) // reduce(math.gcd, whole) > LONGEST_CYCLE:
        whole = [max(1, round(share / total * LONGEST_CYCLE)) for share in exact]
    divisor = reduce(math.gcd, whole)
    return [share // divisor for share in whole]


def spread(shares: Sequence[int]) -> list[int]:
    """Return the numbers 0 to len-1, each by its share, spread evenly (smooth weighted round robin)."""
    total, credit, order = sum(shares), [0] * len(shares), []
    for _ in range(total):
        credit = [have + share for have, share in zip(credit, shares, strict=True)]
        chosen = max(range(len(shares)), key=lambda number: credit[number])
        credit[chosen] -= total
        order.append(chosen)
    return order
