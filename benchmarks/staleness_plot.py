"""The picture and the table of benchmarks/staleness.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

Run = dict[str, Any]
COLOURS = {
    "ppo": "#3b6fb6",
    "decoupled_ppo": "#2a9d8f",
    "dppo": "#d1495b",
    "cispo": "#e09f3e",
    "gspo": "#7b5ea7",
    "decoupled_ppo (recomputed)": "#8fd0c6",
    "unclipped": "#8a8f98",
}
QUIET = "#8a8f98"


def plot(runs: Sequence[Run], file: Path) -> None:
    """Write a PNG: accuracy over steps at each staleness, mean of the seeds with a band of one standard deviation."""
    ages = sorted({run["staleness"] for run in runs} - {0})
    fresh = [run for run in runs if run["staleness"] == 0]
    figure = Figure(figsize=(4.0 * len(ages), 4.4), dpi=150, layout="constrained")
    figure.patch.set_facecolor("white")
    panels = np.atleast_1d(figure.subplots(1, len(ages), sharey=True))
    for panel, age in zip(panels, ages, strict=True):
        _band(panel, fresh, "fresh data", QUIET, "--")
        for name in COLOURS:
            _band(panel, [r for r in runs if r["staleness"] == age and r["loss"] == name], name, COLOURS[name], "-")
        panel.set_title(f"every batch {age} version{'s' if age > 1 else ''} old", fontsize=10)
        panel.set_xlabel("optimizer steps")
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    panels[0].set_ylabel("held-out accuracy, greedy")
    entries: dict[str, Line2D] = {}
    for panel in panels:
        entries.update((line.get_label(), line) for line in panel.get_lines())
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=len(entries), frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def table(runs: Sequence[Run]) -> str:
    """Final accuracy in points, mean and standard deviation over seeds, and the mean gain over fresh data, as Markdown.

    The gain compares a seed with itself at staleness 0, since seeds differ more than losses do.
    """
    ages = sorted({run["staleness"] for run in runs})
    final = {(run["loss"], run["staleness"], run["seed"]): 100 * run["accuracy"][-1][1] for run in runs}
    fresh = {seed: points for (_, age, seed), points in final.items() if age == 0}
    lines = [
        "| Loss | " + " | ".join(f"staleness {age}" for age in ages) + " |",
        "| --- |" + " --- |" * len(ages),
    ]
    for name in COLOURS:
        cells = []
        for age in ages:
            found = {seed: points for (loss, old, seed), points in final.items() if (loss, old) == (name, age)}
            gains = [points - fresh[seed] for seed, points in found.items() if seed in fresh]
            spread = f" ± {stdev(found.values()):.1f}" if len(found) > 1 else ""
            gain = f", {fmean(gains):+.1f}" if gains and age else ""
            cells.append(f"{fmean(found.values()):.1f}{spread}{gain} ({len(found)})" if found else "")
        if any(cells):
            lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _band(panel: Axes, runs: Sequence[Run], label: str, colour: str, style: str) -> None:
    if not runs:
        return
    # Runs may have been looked at at different steps: between two looks the curve is a line.
    steps = [step for step, _ in runs[-1]["accuracy"]]
    accuracies = np.array([np.interp(steps, *zip(*run["accuracy"], strict=True)) for run in runs])
    mean, spread = accuracies.mean(0), accuracies.std(0, ddof=1) if len(runs) > 1 else np.zeros(len(steps))
    panel.plot(steps, mean, style, color=colour, label=label, linewidth=1.6)
    panel.fill_between(steps, mean - spread, mean + spread, color=colour, alpha=0.12, linewidth=0)
