"""The plot of benchmarks/end_to_end: held-out accuracy over samples and over minutes, a row for each algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.end_to_end.contenders import ALGORITHMS

COLOURS = {"transformers": "#3b6fb6", "vllm": "#2a9d8f", "trl": "#d1495b"}
LABELS = {"transformers": "Tidemill, transformers", "vllm": "Tidemill, vLLM", "trl": "TRL"}
STYLES = ("-", "--", ":", "-.")


def plot(runs: Sequence[dict[str, Any]], file: Path) -> None:
    """Write a PNG of the runs' accuracies: the mean of the seeds, and a band from the least to the most.

    runs: lines of ``--out``. A colour is a contender, a line's style a learning rate.
    """
    tasks = sorted({(run["workload"], run["algorithm"]) for run in runs})
    rates = sorted({run["lr"] for run in runs})
    figure = Figure(figsize=(9.0, 3.2 * len(tasks) + 0.4), dpi=150, layout="constrained")
    figure.patch.set_facecolor("white")
    panels = figure.subplots(len(tasks), 2, squeeze=False, sharey="row")
    for (workload, algorithm), (by_samples, by_minutes) in zip(tasks, panels, strict=True):
        for rate, style in zip(rates, STYLES, strict=False):
            for contender in COLOURS:
                key = (workload, algorithm, rate, contender)
                seeds = [r for r in runs if (r["workload"], r["algorithm"], r["lr"], r["contender"]) == key]
                if seeds:
                    label = f"{LABELS[contender]}, rate {rate:g}"
                    _band(by_samples, seeds, 0, ALGORITHMS[algorithm].step / 1000, COLOURS[contender], style, label)
                    _band(by_minutes, seeds, 1, 1 / 60, COLOURS[contender], style, label)
        by_samples.set_xlabel("thousand samples")
        by_minutes.set_xlabel("minutes since the command")
        by_samples.set_ylabel(f"{workload}, {algorithm}: held-out accuracy")
        for panel in (by_samples, by_minutes):
            panel.spines[["top", "right"]].set_visible(False)
            panel.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    entries = {label: line for row in panels for line, label in zip(*row[0].get_legend_handles_labels(), strict=True)}
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def _band(
    panel: Axes, seeds: Sequence[dict[str, Any]], column: int, unit: float, colour: str, style: str, label: str
) -> None:
    # Seeds are evaluated at the same steps but at different times; the mean is over both.
    looks = [np.array(run["accuracy"]) for run in seeds]
    count = min(map(len, looks))
    places = np.mean([look[:count, column] for look in looks], 0) * unit
    accuracies = np.array([look[:count, 2] for look in looks])
    panel.plot(places, accuracies.mean(0), style, color=colour, label=label, linewidth=1.6)
    panel.fill_between(places, accuracies.min(0), accuracies.max(0), color=colour, alpha=0.12, linewidth=0)
