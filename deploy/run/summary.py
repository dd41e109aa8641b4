"""The figures of a finished run in summary.json.

They come from the trainer's own logs, and are compared with the broker's last counts: a sample that was published but
neither trained, dropped, excluded nor still in the pipeline was lost.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schemas.errors import DiskError
from schemas.run_folder import METRICS, SUMMARY, TRAINED, read_lines, surviving_lines


@dataclass(frozen=True)
class Evaluation:
    """A complete evaluation on held-out prompts. reward: mean; wall_s: since the run began.

    accuracy: share of correct samples; None if the configuration does not say which are correct.
    """

    version: int
    reward: float
    wall_s: float = 0.0
    accuracy: float | None = None


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


def figure(line: Mapping[str, Any], name: str) -> float | None:
    """Return a step's figure, which may be filed under ``train/``; None when it is not there."""
    value = line.get(name, line.get(f"train/{name}"))
    return None if value is None else float(value)


def summarise(metrics: Sequence[dict[str, Any]], trained: Sequence[dict[str, Any]], final: Final) -> dict[str, Any]:
    """Return the summary, from all lines of both logs."""
    steps, batches = surviving_lines(metrics), surviving_lines(trained)
    uses = Counter((task, sample) for line in batches for task, sample in line["samples"])
    excluded = sum(int(line.get("excluded", 0)) for line in batches)
    evaluations = sorted(final.evaluations, key=lambda evaluation: evaluation.version)
    # Weights that were trained already say nothing of how it was before.
    before = evaluations[0] if evaluations and evaluations[0].version == 0 else None
    after = evaluations[-1] if evaluations else None
    gone = len(uses) + final.dropped + final.failed + excluded + final.live
    return {
        "exit_reason": final.exit_reason,
        "reward_before": before and before.reward,
        "reward_after": after and after.reward,
        "accuracy_before": before and before.accuracy,
        "accuracy_after": after and after.accuracy,
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
    """Return the mean over tokens, not over steps; None if no step has the figure."""
    total = weights = 0.0
    for line in lines:
        value, tokens = figure(line, name), figure(line, weight)
        if value is not None and tokens:
            total += value * tokens
            weights += tokens
    return total / weights if weights else None


def _phases(metrics: Sequence[dict[str, Any]], final: Final) -> dict[str, float]:
    """Return seconds by phase: the caller's, and the trainer's steps under ``trainer/``, with replayed steps."""
    phases = dict(final.phases_s)
    for line in metrics:
        for name, value in line.items():
            if name.startswith("time/"):
                phase = "trainer/" + name.removeprefix("time/").removesuffix("_s")
                phases[phase] = phases.get(phase, 0.0) + float(value)
    return phases
