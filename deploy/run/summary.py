"""The end of a run summed up: summary.json, a picture of reward and accuracy, and a table for people.

Figures come from the trainer's own logs, and are held against the broker's last counts: a sample that was published
but neither trained, dropped, excluded nor still in the pipeline was lost.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import redis
from rich.console import Console
from rich.table import Table

from broker.client import Broker
from broker.evaluations.results import EvalResult
from consumers.trainer.records.evaluations import read_evaluations
from deploy.run_files import SUMMARY
from deploy.supervisor.supervisor import RunOutcome
from deploy.terminal.page import clock
from schemas.config import TidemillConfig
from schemas.errors import DiskError, TidemillError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REWARD, ACCURACY, INK, QUIET = "#3b6fb6", "#d1495b", "#222222", "#8a8f98"


def plot_run(metrics: Sequence[dict[str, Any]], evaluations: Sequence[Evaluation], title: str, file: Path) -> None:
    """Write a PNG. ``metrics`` are the lines of metrics.jsonl; an evaluation of version v belongs to step v."""
    # matplotlib takes a second to load and nothing before needs it.
    from matplotlib.figure import Figure

    lines = [line for line in surviving_lines(metrics) if "reward/mean" in line]
    rewards = [float(line["reward/mean"]) for line in lines]
    figure = Figure(figsize=(11, 4.2), dpi=150, layout="constrained")
    figure.patch.set_facecolor("white")
    left, right = figure.subplots(1, 2, sharey=True)
    accuracies = [evaluation.accuracy for evaluation in evaluations]
    _curves(left, [line["step"] for line in lines], rewards, [e.version for e in evaluations], accuracies)
    minutes = [line["wall_s"] / 60 for line in lines]
    _curves(right, minutes, rewards, [e.wall_s / 60 for e in evaluations], accuracies)
    left.set_xlabel("optimizer steps", color=QUIET)
    right.set_xlabel("minutes", color=QUIET)
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper right", ncols=2, frameon=False, fontsize=10)
    figure.savefig(file)


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Centred running mean over at most ``window`` values, fewer at both ends."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
    before, after = (window - 1) // 2, window // 2
    index = np.arange(len(values))
    low, high = np.maximum(index - before, 0), np.minimum(index + after + 1, len(values))
    means: list[float] = ((sums[high] - sums[low]) / (high - low)).tolist()
    return means


def _curves(
    axes: Axes, xs: Sequence[float], rewards: list[float], eval_xs: Sequence[float], evals: list[float]
) -> None:
    if rewards:
        axes.plot(xs, rewards, color=REWARD, alpha=0.22, linewidth=0.8)
        window = max(1, len(rewards) // 40)
        axes.plot(xs, smooth(rewards, window), color=REWARD, linewidth=1.8, label="training reward")
    if evals:
        axes.plot(eval_xs, evals, color=ACCURACY, linewidth=1.8, marker="o", markersize=5, label="held-out accuracy")
        ends = (0, len(evals) - 1) if len(evals) > 1 else (0,)
        for end in ends:
            axes.annotate(
                f"{evals[end]:.2f}",
                (eval_xs[end], evals[end]),
                xytext=(10, -4) if end == 0 else (0, -17),
                textcoords="offset points",
                ha="left" if end == 0 else "center",
                fontsize=9,
                color=ACCURACY,
                fontweight="bold",
            )
    axes.set_xlim(left=0)
    axes.margins(y=0.12)
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=QUIET, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#c9cdd2")


METRICS = "metrics.jsonl"
TRAINED = "trained.jsonl"
EVALUATIONS = "evaluations.jsonl"


@dataclass(frozen=True)
class Evaluation:
    """A complete evaluation on held-out prompts. wall_s: since the run began."""

    version: int
    accuracy: float
    wall_s: float = 0.0


@dataclass(frozen=True)
class Final:
    """Figures that the logs do not hold, from the broker and the caller. Samples are of training only.

    published: first deliveries. dropped, failed: published samples of groups that ended untrained.
    live: published samples of groups that are still in the pipeline. phases_s: seconds by phase.
    Without ``published`` (the broker did not answer any more) what was lost is unknown.
    """

    exit_reason: str
    published: int | None = None
    dropped: int = 0
    failed: int = 0
    live: int = 0
    dropped_stale: int = 0
    tokens_generated: int = 0
    evaluations: Sequence[Evaluation] = ()
    phases_s: Mapping[str, float] = field(default_factory=dict)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file, one a line; a last line that was cut off by a crash is left out."""
    if not file.is_file():
        return []
    lines = []
    for text in file.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def surviving_lines(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of the surviving weights, by step.

    A trainer that resumed from a checkpoint goes back to an earlier step: what was written of
    that step and later ones before is not in the weights any more.
    """
    kept: list[dict[str, Any]] = []
    newest = 0
    for line in lines:
        leader_term = int(str(line.get("leader_term", newest)).partition("-")[0])
        if leader_term < newest:
            # Written by a trainer that had been replaced and did not know it yet.
            continue
        newest = leader_term
        step = line.get("resumed", line.get("step"))
        while kept and kept[-1]["step"] >= step:
            kept.pop()
        if "resumed" not in line:
            kept.append(line)
    return kept


def figure(line: Mapping[str, Any], name: str) -> float | None:
    """A step's figure, which may be filed under ``train/``; None when it is not there."""
    value = line.get(name, line.get(f"train/{name}"))
    return None if value is None else float(value)


def summarise(metrics: Sequence[dict[str, Any]], trained: Sequence[dict[str, Any]], final: Final) -> dict[str, Any]:
    """The summary, from all lines of both logs."""
    steps, batches = surviving_lines(metrics), surviving_lines(trained)
    uses = Counter((task, sample) for line in batches for task, sample in line["samples"])
    excluded = sum(int(line.get("excluded", 0)) for line in batches)
    evaluations = sorted(final.evaluations, key=lambda evaluation: evaluation.version)
    gone = len(uses) + final.dropped + final.failed + excluded + final.live
    return {
        "exit_reason": final.exit_reason,
        # Weights that were trained already say nothing of how it was before.
        "accuracy_before": evaluations[0].accuracy if evaluations and evaluations[0].version == 0 else None,
        "accuracy_after": evaluations[-1].accuracy if evaluations else None,
        "steps": len(batches),
        "versions_published": 1 + max((int(line["version"]) for line in steps), default=-1) if steps else 0,
        "trajectories": final.published,
        "trajectories_trained": len(uses),
        "trajectories_trained_twice": sum(count - 1 for count in uses.values()),
        "trajectories_lost": None if final.published is None else final.published - gone,
        "trajectories_dropped_stale": final.dropped_stale,
        "trajectories_excluded": excluded,
        "tokens_generated": final.tokens_generated,
        "tokens_trained": int(sum(figure(line, "tokens") or 0 for line in steps)),
        "max_staleness": int(max((line.get("staleness/max", 0) for line in steps), default=0)),
        "mean_staleness": _mean(steps, "staleness/mean", "tokens"),
        "logprob_gap_mean": _mean(steps, "logprob_gap_mean", "logprob_gap_tokens"),
        "wall_s": round(float(metrics[-1]["wall_s"]), 3) if metrics else 0.0,
        "wall_s_by_phase": {name: round(seconds, 3) for name, seconds in _phases(metrics, final).items()},
    }


def write_summary(folder: Path, final: Final) -> dict[str, Any]:
    """Summarise the run in ``folder`` and write summary.json there."""
    summary = summarise(read_lines(folder / METRICS), read_lines(folder / TRAINED), final)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise DiskError(f"cannot write {folder / SUMMARY}: {error.strerror}") from error
    return summary


def _mean(lines: Sequence[dict[str, Any]], name: str, weight: str) -> float | None:
    """Mean over tokens, not over steps; None when no step has the figure."""
    total = weights = 0.0
    for line in lines:
        value, tokens = figure(line, name), figure(line, weight)
        if value is not None and tokens:
            total += value * tokens
            weights += tokens
    return total / weights if weights else None


def _phases(metrics: Sequence[dict[str, Any]], final: Final) -> dict[str, float]:
    """The caller's phases, and under ``trainer/`` how the trainer's steps spent theirs, replayed ones included."""
    phases = dict(final.phases_s)
    for line in metrics:
        for name, value in line.items():
            if name.startswith("time/"):
                phase = "trainer/" + name.removeprefix("time/").removesuffix("_s")
                phases[phase] = phases.get(phase, 0.0) + float(value)
    return phases


PLOT = "run.png"
BROKER_DEADLINE_S = 5.0
"""How long to wait for the broker of a run that failed, perhaps because of it."""


@dataclass(frozen=True)
class Ending:
    """A run that is over. summary: what summary.json holds."""

    run: str
    folder: Path
    summary: Mapping[str, Any]
    plot: Path | None

    def print(self, console: Console) -> None:
        """Accuracy before and after where it is known, what the run took, where the rest is; its path comes last."""
        s = self.summary
        title = f"{self.run}: {s['exit_reason'].partition(':')[0]}"
        if s["accuracy_after"] is None:
            console.print(title, style="bold", highlight=False, markup=False)
        else:
            table = Table(title=title, title_justify="left", title_style="bold")
            table.add_column("")
            table.add_column("before", justify="right")
            table.add_column("after", justify="right", style="bold")
            table.add_row("held-out accuracy", _share(s["accuracy_before"]), _share(s["accuracy_after"]))
            console.print(table)
        rows = (
            ("steps", f"{s['steps']:,} in {clock(s['wall_s'])}"),
            ("trajectories", f"{_count(s['trajectories'])}, {s['trajectories_trained']:,} trained"),
            ("lost, trained twice", f"{_count(s['trajectories_lost'])}, {s['trajectories_trained_twice']}"),
            ("tokens", f"{s['tokens_generated']:,} generated, {s['tokens_trained']:,} trained"),
            ("staleness", f"mean {_figure(s['mean_staleness'], 2)}, max {s['max_staleness']}"),
            ("log-probability gap", "-" if s["logprob_gap_mean"] is None else f"{s['logprob_gap_mean']:.1e} nats"),
        )
        for name, value in rows:
            console.print(f"{name:<20} {value}", highlight=False)
        console.print()
        if self.plot is not None:
            print(self.plot)
        print(self.folder / SUMMARY)


def finish(config: TidemillConfig, outcome: RunOutcome, phases: Mapping[str, float]) -> Ending:
    """Sum the run up. The services have stopped, the broker still answers; without it the logs must do."""
    reason = _reason(outcome)
    try:
        settings = config.broker.model_copy(update={"deadline_s": BROKER_DEADLINE_S})
        broker = Broker.connect(config.model_copy(update={"broker": settings}))
        final = _counts(config, broker, reason, phases)
    except (TidemillError, redis.RedisError):
        final = Final(reason, evaluations=_evaluations(config.folder), phases_s=phases)
    summary = write_summary(config.folder, final)
    plot = _plot(config, final, summary)
    return Ending(config.run.name, config.folder, summary, plot)


def note_failed_start(config: TidemillConfig, outcome: RunOutcome, phases: Mapping[str, float]) -> None:
    """Write the summary of a start that failed before anything began, of what earlier ones logged and why it failed."""
    write_summary(config.folder, Final(_reason(outcome), evaluations=_evaluations(config.folder), phases_s=phases))


def _reason(outcome: RunOutcome) -> str:
    return outcome.reason if outcome.cause is None else f"{outcome.reason}: {outcome.cause}"


def _counts(config: TidemillConfig, broker: Broker, reason: str, phases: Mapping[str, float]) -> Final:
    ledger = broker.ledger.read_state()
    return Final(
        exit_reason=reason,
        published=ledger.samples_published,
        dropped=ledger.samples_dropped,
        failed=ledger.samples_failed,
        live=broker.ledger.count_live_samples(),
        # Groups are counted by reason; nearly all have all their samples.
        dropped_stale=ledger.dropped.get("stale", 0) * config.sampling.n,
        tokens_generated=ledger.tokens_generated,
        evaluations=_evaluations(config.folder, broker.evals.read_results(), ledger.started),
        phases_s=phases,
    )


def _evaluations(folder: Path, results: Sequence[EvalResult] = (), started: float = 0.0) -> list[Evaluation]:
    """Those in the run's file, and what the broker has that no trainer wrote any more."""
    found = {
        result.version: Evaluation(result.version, result.mean, max(0.0, result.time - started))
        for result in results
        if result.complete and result.scored
    }
    for version, line in read_evaluations(folder / EVALUATIONS).items():
        if line["mean"] is not None:
            found[version] = Evaluation(version, line["mean"], line["wall_s"])
    return [found[version] for version in sorted(found)]


def _plot(config: TidemillConfig, final: Final, summary: Mapping[str, Any]) -> Path | None:
    metrics = read_lines(config.folder / METRICS)
    if not metrics:
        return None
    title = f"{config.run.name}: {summary['steps']} steps"
    if summary["accuracy_after"] is not None:
        before, after = summary["accuracy_before"], summary["accuracy_after"]
        change = f"{after:.2f}" if before is None else f"{before:.2f} to {after:.2f}"
        title = f"{config.run.name}: held-out accuracy {change} in {summary['steps']} steps"
    file = config.folder / PLOT
    plot_run(metrics, final.evaluations, title, file)
    return file


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _count(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"
