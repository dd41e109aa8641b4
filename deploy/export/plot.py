"""Pictures: the rewards of a run over steps and minutes, and the memory that ``tidemill plan --gpu`` computes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from schemas.run_folder import surviving_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from deploy.planning.fit import Fit

REWARD, HELD_OUT, INK, QUIET = "#3b6fb6", "#d1495b", "#222222", "#8a8f98"
MEMORY = {
    **{"parameters": "#1f3f6e", "gradients": "#3b6fb6", "optimizer": "#6f9bd1"},
    **{"activations": "#c98a2b", "temporary": "#d1495b"},
    **{"weights": "#2f6b57", "engine's own": "#8a8f98", "cache": "#57a283"},
}
"""Colours of the parts of a GPU's memory."""


@dataclass(frozen=True)
class Evaluation:
    """A complete evaluation on held-out prompts. reward: mean. wall_s: seconds since the run began.

    accuracy: share of correct samples; None if the configuration does not say which are correct.
    """

    version: int
    reward: float
    wall_s: float = 0.0
    accuracy: float | None = None


def plot_run(
    metrics: Iterable[dict[str, Any]],
    evaluations: Sequence[Evaluation],
    title: str,
    file: Path,
    last: int | None = None,
) -> None:
    """Write a PNG of a run's rewards. An evaluation of version v is drawn at step v.

    metrics: the lines of metrics.jsonl, looped over twice. last: the last step whose reward is shown.
    """
    # matplotlib takes a second to load and nothing before needs it.
    from matplotlib.figure import Figure

    steps, rewards, minutes = array("q"), array("d"), array("d")
    for line in surviving_lines(metrics):
        if "reward/mean" in line and (last is None or line["step"] <= last):
            steps.append(line["step"])
            rewards.append(line["reward/mean"])
            minutes.append(line["wall_s"] / 60)
    figure = Figure(figsize=(11, 4.2), dpi=150, layout="constrained")
    figure.patch.set_facecolor("white")
    left, right = figure.subplots(1, 2, sharey=True)
    shares = [each.accuracy for each in evaluations if each.accuracy is not None]
    heldout = shares if len(shares) == len(evaluations) else [each.reward for each in evaluations]
    label = "held-out accuracy" if heldout is shares else "held-out reward"
    _curves(left, steps, rewards, [e.version for e in evaluations], heldout, label)
    _curves(right, minutes, rewards, [e.wall_s / 60 for e in evaluations], heldout, label)
    left.set_xlabel("optimizer steps", color=QUIET)
    right.set_xlabel("minutes", color=QUIET)
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper right", ncols=2, frameon=False, fontsize=10)
    figure.savefig(file)


def plot_memory(found: Fit, title: str, file: Path) -> None:
    """Write a PNG: a bar for each way of training that was computed and each engine, beside the card's memory."""
    from matplotlib.figure import Figure

    from deploy.planning.fit import ENGINE_ACTIVATIONS, GIB, PARTS

    rows = [(text, {part: size[part] / GIB for part in PARTS}) for text, size in found.tried.items()]
    for pool, engine in found.engines.items():
        held = engine.share * found.memory - engine.weights - ENGINE_ACTIVATIONS
        parts = {"weights": engine.weights, "engine's own": ENGINE_ACTIVATIONS, "cache": max(0.0, held)}
        rows.append(
            (f"engine of pool {pool}" if pool else "engine", {name: size / GIB for name, size in parts.items()})
        )
    figure = Figure(figsize=(11, 1.9 + 0.42 * len(rows)), dpi=150, layout="constrained")
    axes = figure.subplots()
    for number, (_, parts) in enumerate(rows):
        left = 0.0
        for part, size in parts.items():
            axes.barh(number, size, left=left, height=0.62, color=MEMORY[part])
            if size > 0.04 * max(found.memory / GIB, sum(parts.values())):
                axes.text(left + size / 2, number, f"{size:.1f}", ha="center", va="center", fontsize=9, color="white")
            left += size
        place: dict[str, Any] = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
        total = axes.annotate(f"{left:.1f}", (left, number), color=INK, fontweight="bold", zorder=4, **place)
        total.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
    for limit, label, style in ((found.room, "for tensors", "--"), (found.memory, "the card", "-")):
        axes.axvline(limit / GIB, color=INK, linewidth=1, linestyle=style, label=f"{label}, {limit / GIB:.1f}")
    axes.set_yticks(range(len(rows)), [text for text, _ in rows])
    axes.invert_yaxis()
    axes.margins(x=0.06)
    axes.set_xlabel("GiB of a GPU", color=QUIET)
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", color=INK)
    _clear(axes)
    there = {part: MEMORY[part] for _, parts in rows for part in parts}
    handles = [axes.barh(0, 0, color=color, label=part) for part, color in there.items()]
    lines = axes.get_lines()
    figure.legend(handles=[*handles, *lines], loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(file)


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return the centred running mean over at most ``window`` values, fewer at both ends."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
    before, after = (window - 1) // 2, window // 2
    index = np.arange(len(values))
    low, high = np.maximum(index - before, 0), np.minimum(index + after + 1, len(values))
    means: list[float] = ((sums[high] - sums[low]) / (high - low)).tolist()
    return means


def _curves(
    axes: Axes, xs: Sequence[float], rewards: Sequence[float], eval_xs: Sequence[float], evals: list[float], label: str
) -> None:
    if rewards:
        axes.plot(xs, rewards, color=REWARD, alpha=0.22, linewidth=0.8)
        window = max(1, len(rewards) // 40)
        axes.plot(xs, smooth(rewards, window), color=REWARD, linewidth=1.8, label="training reward")
    if evals:
        axes.plot(eval_xs, evals, color=HELD_OUT, linewidth=1.8, marker="o", markersize=5, label=label)
        style: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9, "color": HELD_OUT, "fontweight": "bold"}
        for end in sorted({0, len(evals) - 1}):
            style |= {"xytext": (0, -17), "ha": "center"} if end else {"xytext": (10, -4), "ha": "left"}
            axes.annotate(f"{evals[end]:.2f}", (eval_xs[end], evals[end]), **style)
    axes.set_xlim(left=0)
    axes.margins(y=0.12)
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    _clear(axes)


def _clear(axes: Axes) -> None:
    axes.set_axisbelow(True)
    axes.tick_params(colors=QUIET, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#c9cdd2")
