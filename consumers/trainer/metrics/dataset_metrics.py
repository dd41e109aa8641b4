"""Metrics of each dataset, over all complete groups: the mean of a mixture hides a part that is solved or hopeless."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt


class DatasetMeter:
    """Counts complete prompt groups by the label of their dataset; ``take`` ends a step."""

    def __init__(self) -> None:
        self._sums: dict[str, npt.NDArray[np.float64]] = {}

    def add(self, dataset: str, rewards: Sequence[float], correct: Sequence[bool], level: int = -1) -> None:
        """Count a group, also under its level, by the rewards of its scored samples and whether they are correct."""
        if level >= 0:
            self.add(f"{dataset}/level_{level}", rewards, correct)
        own = (1, len(rewards), sum(rewards), sum(correct), not any(correct), all(correct))
        self._sums[dataset] = self._sums.get(dataset, 0.0) + np.array(own, np.float64)

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call, ``data/LABEL/...`` and for a level ``data/LABEL/level_N/...``."""
        figures: dict[str, float] = {}
        for dataset in sorted(self._sums):
            groups, samples, reward, correct, solved_none, solved_all = self._sums[dataset].tolist()
            of_dataset = {
                "groups": groups,
                "reward_mean": reward / samples,
                "solve_rate": correct / samples,
                "solve_none": solved_none,
                "solve_all": solved_all,
            }
            figures |= {f"data/{dataset}/{name}": value for name, value in of_dataset.items()}
        self._sums = {}
        return figures


def curriculum_figures(counts: Mapping[str, int], statistics: bytes) -> dict[str, float]:
    """Return what a curriculum skipped so far, and what it knows of prompts; {} without a curriculum.

    counts: the ledger's. statistics: four bytes for each prompt, the first its solve rate in 1/255, the second its
    groups.
    """
    skipped, admitted = counts.get("skipped", 0), counts.get("admitted", 0)
    figures = {"data/skipped_fraction": skipped / (skipped + admitted)} if skipped else {}
    body = np.frombuffer(statistics[: len(statistics) // 4 * 4], np.uint8).reshape(-1, 4)
    solved = body[body[:, 1] > 0, 0]
    if len(solved):
        figures["data/prompts_seen"] = float(len(solved))
        figures["data/prompts_unsolved"] = float((solved == 0).sum())
        figures["data/prompts_solved"] = float((solved == 255).sum())
    return figures
