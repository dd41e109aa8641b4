"""Metrics of each of a run's datasets: the mean reward of a mixture hides a part that is solved or hopeless.

Groups are counted when they are complete, before any is filtered out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass
class _Counts:
    groups: int = 0
    samples: int = 0
    reward: float = 0.0
    correct: int = 0
    none: int = 0
    all: int = 0


class DatasetMeter:
    """Counts complete prompt groups by the label of their dataset; ``take`` ends a step."""

    def __init__(self) -> None:
        self._counts: dict[str, _Counts] = {}

    def add(self, dataset: str, rewards: Sequence[float], correct: Sequence[bool], level: int = -1) -> None:
        """Count a group, also under its level, by the rewards of its scored samples and whether they are correct."""
        if level >= 0:
            self.add(f"{dataset}/level_{level}", rewards, correct)
        counts = self._counts.setdefault(dataset, _Counts())
        counts.groups += 1
        counts.samples += len(rewards)
        counts.reward += sum(rewards)
        counts.correct += sum(correct)
        counts.none += not any(correct)
        counts.all += all(correct)

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call, ``data/LABEL/...`` and for a level ``data/LABEL/level_N/...``."""
        figures: dict[str, float] = {}
        for dataset, counts in sorted(self._counts.items()):
            of_dataset = {
                "groups": float(counts.groups),
                "reward_mean": counts.reward / counts.samples,
                "solve_rate": counts.correct / counts.samples,
                "solve_none": float(counts.none),
                "solve_all": float(counts.all),
            }
            figures |= {f"data/{dataset}/{name}": value for name, value in of_dataset.items()}
        self._counts = {}
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
