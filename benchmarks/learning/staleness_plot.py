"""The plot and the table of benchmarks/learning/staleness.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

Run = dict[str, Any]
COLOURS = {"ppo": "#3b6fb6", "decoupled_ppo": "#2a9d8f", "dppo": "#d1495b", "cispo": "#e09f3e", "gspo": "#7b5ea7"}
QUIET = "#8a8f98"


def plot(runs: Sequence[Run], file: Path) -> None:
    """Write a PNG: accuracy over steps, a row for each advantage and a column for each staleness.

    Lines are means of the seeds, with a band of one standard deviation.
    """
    ages = sorted({run["staleness"] for run in runs} - {0})
    advantages = list(dict.fromkeys(run["advantage"] for run in runs))
    figure = Figure(figsize=(4.0 * len(ages), 3.4 * len(advantages) + 1.0), dpi=150, layout="constrained")
    figure.patch.set_facecolor("white")
    rows = figure.subplots(len(advantages), len(ages), sharex=True, sharey=True, squeeze=False)
    for row, advantage in zip(rows, advantages, strict=True):
        own = [run for run in runs if run["advantage"] == advantage]
        for panel, age in zip(row, ages, strict=True):
            _band(panel, [r for r in own if r["staleness"] == 0], "fresh data", QUIET, "--")
            for name in COLOURS:
                _band(panel, [r for r in own if (r["staleness"], r["loss"]) == (age, name)], name, COLOURS[name], "-")
            panel.spines[["top", "right"]].set_visible(False)
            panel.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        row[0].set_ylabel(f"held-out accuracy, {advantage}")
    for panel, age in zip(rows[0], ages, strict=True):
        panel.set_title(f"every batch {age} version{'s' if age > 1 else ''} old", fontsize=10)
    for panel in rows[-1]:
        panel.set_xlabel("optimizer steps")
    entries: dict[str, Line2D] = {}
    for panel in rows.flat:
        entries.update((line.get_label(), line) for line in panel.get_lines())
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=len(entries), frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def table(runs: Sequence[Run]) -> str:
    """Markdown: for each advantage, final accuracy in points, mean and standard deviation over seeds.

    Behind it the mean gain over fresh data, each seed compared with itself since seeds differ more than losses do, and
    the learning rate. Last, how far the mean curve is from its start at its lowest look after it.
    """
    ages = sorted({run["staleness"] for run in runs})
    lines = [
        "| Advantage, loss | " + " | ".join(f"staleness {age}" for age in ages) + " | lowest look |",
        "| --- |" + " --- |" * (len(ages) + 1),
    ]
    for advantage in dict.fromkeys(run["advantage"] for run in runs):
        own = [run for run in runs if run["advantage"] == advantage]
        fresh = {run["seed"]: _final(run) for run in own if run["staleness"] == 0}
        for name in COLOURS:
            found = {age: [r for r in own if (r["loss"], r["staleness"]) == (name, age)] for age in ages}
            if not any(found.values()):
                continue
            cells = [_cell(found[age], fresh if age else {}) for age in ages]
            lowest = ", ".join(_lowest(found[age]) for age in ages if found[age])
            lines.append(f"| `{advantage}`, `{name}` | " + " | ".join(cells) + f" | {lowest} |")
    return "\n".join(lines)


def _final(run: Run) -> float:
    return 100 * float(run["accuracy"][-1][1])


def _cell(runs: Sequence[Run], fresh: Mapping[int, float]) -> str:
    if not runs:
        return ""
    points = [_final(run) for run in runs]
    gains = [_final(run) - fresh[run["seed"]] for run in runs if run["seed"] in fresh]
    spread = f" ± {stdev(points):.1f}" if len(points) > 1 else ""
    gain = f", {fmean(gains):+.1f}" if gains else ""
    return f"{fmean(points):.1f}{spread}{gain}; {runs[0]['lr']:.0e}"


def _lowest(runs: Sequence[Run]) -> str:
    """The lowest change of the mean curve from its start, in points, with the seeds' standard deviation there."""
    changes = [[100 * (accuracy - run["accuracy"][0][1]) for _, accuracy in run["accuracy"][1:]] for run in runs]
    look = min(zip(*changes, strict=True), key=fmean)
    return f"{fmean(look):+.1f}" + (f" ± {stdev(look):.1f}" if len(look) > 1 else "")


def _band(panel: Axes, runs: Sequence[Run], label: str, colour: str, style: str) -> None:
    if not runs:
        return
    # Runs may have been looked at at different steps: between two looks the curve is a line.
    steps = [step for step, _ in runs[-1]["accuracy"]]
    accuracies = np.array([np.interp(steps, *np.array(run["accuracy"]).T) for run in runs])
    mean, spread = accuracies.mean(0), accuracies.std(0, ddof=1) if len(runs) > 1 else np.zeros(len(steps))
    panel.plot(steps, mean, style, color=colour, label=label, linewidth=1.6)
    panel.fill_between(steps, mean - spread, mean + spread, color=colour, alpha=0.12, linewidth=0)
