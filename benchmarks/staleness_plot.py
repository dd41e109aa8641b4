"""The picture and the table of benchmarks/staleness.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Run = dict[str, Any]
COLOURS = {
    "ppo": "#3b6fb6",
    "decoupled_ppo": "#2a9d8f",
    "dppo": "#d1495b",
    "cispo": "#e09f3e",
    "gspo": "#7b5ea7",
    "decoupled_ppo (interpolated)": "#1b4d46",
    "unclipped": "#8a8f98",
}
QUIET = "#8a8f98"


def plot(runs: Sequence[Run], file: Path) -> None:
    """Write a PNG: accuracy over steps at each staleness, mean of the seeds with a band of one standard deviation."""
    ages = sorted({run["staleness"] for run in runs} - {0})
    fresh = [run for run in runs if run["staleness"] == 0]
    figure = Figure(figsize=(4.2 * len(ages), 4.0), dpi=150, layout="constrained")
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
    panels[-1].legend(frameon=False, fontsize=8, loc="lower right")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def table(runs: Sequence[Run]) -> str:
    """Final accuracy in points, mean and standard deviation over seeds, as Markdown."""
    ages = sorted({run["staleness"] for run in runs})
    lines = [
        "| Loss | " + " | ".join(f"staleness {age}" for age in ages) + " |",
        "| --- |" + " --- |" * len(ages),
    ]
    for name in COLOURS:
        cells = []
        for age in ages:
            found = [100 * r["accuracy"][-1][1] for r in runs if r["loss"] == name and r["staleness"] == age]
            spread = f" ± {stdev(found):.1f}" if len(found) > 1 else ""
            cells.append(f"{fmean(found):.1f}{spread} ({len(found)})" if found else "")
        if any(cells):
            lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _band(panel: Axes, runs: Sequence[Run], label: str, colour: str, style: str) -> None:
    if not runs:
        return
    steps = [step for step, _ in runs[0]["accuracy"]]
    accuracies = np.array([[accuracy for _, accuracy in run["accuracy"]] for run in runs])
    mean, spread = accuracies.mean(0), accuracies.std(0, ddof=1) if len(runs) > 1 else np.zeros(len(steps))
    panel.plot(steps, mean, style, color=colour, label=f"{label} ({len(runs)})", linewidth=1.6)
    panel.fill_between(steps, mean - spread, mean + spread, color=colour, alpha=0.12, linewidth=0)
