"""Metrics of prompt groups and samples before the filter, counted from one step to the next.

A step trains the groups that teach something; how many are always or never solved shows only in all complete groups.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

NAMES, LONGEST_NAME = 64, 64
"""Most names of workflows' metrics in a step, and their length: trackers keep every name that they get."""

FILTERS = ("zero_variance", "mean_reward")
"""Reasons for which a complete group is filtered out: it would teach nothing."""


class GroupMeter:
    """Counts complete prompt groups, and those that are dropped; ``take`` ends a step."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._groups = self._without_signal = self._unsolved = self._solved = 0
        self._failed: Counter[str] = Counter()
        self._excluded = 0
        self._rewards: list[float] = []
        self._dropped: Counter[str] = Counter()
        self.in_vain = 0
        """Number of filtered groups since the last one that taught something, or the last step."""

    def add(self, rewards: Sequence[float], signal: bool, solved: Sequence[float] = ()) -> None:
        """Count a group. signal: whether rewards differ. solved: per sample, 1 or more if right, 0 or less if wrong."""
        self._groups += 1
        self._without_signal += not signal
        self._rewards += rewards
        self._solved += all(value >= 1 for value in solved or rewards)
        self._unsolved += all(value <= 0 for value in solved or rewards)

    def lose(self, failed: Sequence[str], excluded: int) -> None:
        """Count samples without a reward: by kind, those that failed in a generator; those whose reward failed."""
        self._failed.update(failed)
        self._excluded += excluded

    def drop(self, reason: str) -> None:
        """Count a dropped group."""
        self._dropped[reason] += 1
        self.in_vain += reason in FILTERS

    def keep(self) -> None:
        """Note that a group was kept, which ends a series of filtered ones."""
        self.in_vain = 0

    def describe(self) -> str:
        """Say, as the end of a sentence, which groups were dropped since the last step."""
        counts = ", ".join(f"{count} {reason}" for reason, count in self._dropped.items())
        return f"; dropped meanwhile: {counts}" if counts else ""

    @property
    def filtered(self) -> int:
        """Number of complete groups since the last step that were left out because they teach nothing."""
        return sum(self._dropped[reason] for reason in FILTERS)

    def describe_filtered(self) -> str:
        """Say in a clause how many complete groups since the last step taught nothing, and why."""
        return (
            f"{self.filtered} of the {self._groups} prompt groups that came back were left out, because their rewards"
            f" tell nothing: every sample was right in {self._solved} of all, none in {self._unsolved}"
        )

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call; those of complete groups only if there are any."""
        figures = {f"groups/dropped_{reason}": float(count) for reason, count in sorted(self._dropped.items())}
        figures |= {"groups/complete": float(self._groups), "groups/dropped": float(self._dropped.total())}
        figures |= {f"samples/failed_{kind}": float(count) for kind, count in sorted(self._failed.items())}
        figures |= {"samples/failed": float(self._failed.total()), "samples/unscored": float(self._excluded)}
        if self._groups:
            figures["groups/zero_variance_fraction"] = self._without_signal / self._groups
            figures["groups/solve_none_fraction"] = self._unsolved / self._groups
            figures["groups/solve_all_fraction"] = self._solved / self._groups
            figures["groups/filtered_fraction"] = self.filtered / self._groups
            figures["reward/unfiltered_mean"] = float(np.mean(self._rewards))
        self._clear()
        return figures


def term_metrics(components: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return mean and standard deviation of each term of the reward, over the samples that have it."""
    figures = {}
    for name in sorted({name for terms in components for name in terms}):
        values = [terms[name] for terms in components if name in terms]
        figures[f"reward/{name}/mean"] = float(np.mean(values))
        figures[f"reward/{name}/std"] = float(np.std(values))
    return figures


def episode_metrics(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each of the workflow's metrics over the samples that have it; of the ``NAMES`` commonest."""
    values: dict[str, list[float]] = {}
    for of_sample in metrics:
        for name, value in of_sample.items():
            if name.isprintable() and 0 < len(name) <= LONGEST_NAME:
                values.setdefault(name, []).append(value)
    kept = sorted(values, key=lambda name: (-len(values[name]), name))[:NAMES]
    means = {f"episode/{name}": sum(value / len(values[name]) for value in values[name]) for name in sorted(kept)}
    return {name: mean for name, mean in means.items() if math.isfinite(mean)}
