"""Rounds of contenders: each round runs all of them once, so that a busy machine slows all alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

Advance = Callable[[int], None]
"""Called with the number of runs, or trajectories, that were finished since the last call."""
Figures = Mapping[str, float]
"""The figures of a contender in one round, by name."""
Round = Mapping[str, Figures]
"""The figures of one round by contender."""


@dataclass(frozen=True)
class Spread:
    """Median and range of a figure over the rounds. A format specification applies to all three."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of at least one value."""
        found = sorted(values)
        return cls(median(found), found[0], found[-1])

    def __format__(self, specification: str) -> str:
        shown = (format(value, specification) for value in (self.median, self.low, self.high))
        return "{} ({}–{})".format(*shown)


Summary = Mapping[str, Mapping[str, Spread]]
"""Each figure of each contender over all rounds."""


def compare(
    contenders: Mapping[str, Callable[[], Figures]],
    rounds: int,
    warm_up: int = 1,
    advance: Advance = lambda turns: None,
) -> list[Round]:
    """Run the contenders in turns and return the rounds, without the first ``warm_up``, which do not count."""
    done: list[Round] = []
    for _ in range(warm_up + rounds):
        figures: dict[str, Figures] = {}
        for name, run in contenders.items():
            figures[name] = run()
            advance(1)
        done.append(figures)
    return done[warm_up:]


def summarize(rounds: Sequence[Round]) -> Summary:
    """Return the spread of every figure of every contender."""
    return {
        name: {figure: Spread.of(done[name][figure] for done in rounds) for figure in figures}
        for name, figures in rounds[0].items()
    }


def ratio(rounds: Sequence[Round], figure: str, above: str, below: str) -> Spread:
    """Return a figure of one contender over that of another, round by round."""
    return Spread.of(done[above][figure] / done[below][figure] for done in rounds)
