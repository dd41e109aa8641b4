"""Several datasets in one deterministic order: a position becomes a dataset and an example of it.

Positions come in cycles. In each, every dataset has a number of places that stands to the others' as its weight does,
spread evenly, so that each batch has nearly the mixture of the whole; and each dataset goes through its own epochs.
Only the position is state: it tells how far every dataset is, on every machine and after every restart.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from pathlib import Path

from producers.datasets.base import Dataset
from producers.datasets.loading import build_dataset
from producers.datasets.prompt_order import PromptOrder
from schemas.config import TrainDataset

LONGEST_CYCLE = 10_000
"""Most positions of a cycle; weights that would need more are rounded to so many parts."""


@dataclass(frozen=True)
class Part:
    """A dataset of a mixture, with its label and its weight."""

    label: str
    dataset: Dataset
    weight: float = 1.0
    shuffle: bool = True


@dataclass(frozen=True)
class Place:
    """What stands at a position: the example ``index`` of part ``part``, which is in its epoch ``epoch``."""

    part: int
    epoch: int
    index: int


class Mixture:
    """Positions 0, 1, 2, … without end over the datasets of ``parts``::

    mixture = Mixture([Part("gsm8k", gsm8k, weight=3), Part("code", code, weight=1)], seed=0)
    place = mixture.at(10_000)
    example = mixture.parts[place.part].dataset[place.index]
    """

    def __init__(self, parts: Sequence[Part], seed: int = 0) -> None:
        self.parts = list(parts)
        self._orders = [PromptOrder(len(part.dataset), seed, part.shuffle) for part in parts]
        self._cycle = spread(whole_shares([part.weight for part in parts]))
        self._places = [[at for at, part in enumerate(self._cycle) if part == number] for number in range(len(parts))]

    def at(self, position: int) -> Place:
        """The example at ``position`` (0 or more)."""
        if position < 0:
            raise ValueError(f"position {position} must be 0 or more")
        cycle, at = divmod(position, len(self._cycle))
        part = self._cycle[at]
        places = self._places[part]
        epoch, index = self._orders[part].at(cycle * len(places) + bisect.bisect_left(places, at))
        return Place(part, epoch, index)


def build_mixture(datasets: Sequence[TrainDataset], base: Path, seed: int) -> Mixture:
    """The mixture that the configuration names; ConfigError is one line."""
    return Mixture(
        [Part(one.label, build_dataset(one, base), one.weight, one.shuffle) for one in datasets],
        seed,
    )


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
    """The numbers 0 to len-1, each as often as its share says, spread evenly (smooth weighted round robin)."""
    total, credit, order = sum(shares), [0] * len(shares), []
    for _ in range(total):
        credit = [have + share for have, share in zip(credit, shares, strict=True)]
        chosen = max(range(len(shares)), key=lambda number: credit[number])
        credit[chosen] -= total
        order.append(chosen)
    return order
