"""How a run went, in numbers: summary.json, from the trainer's own logs and the broker's last counts.

The logs are the evidence, the broker's counts are what they are held against: a sample that was
published but neither trained, dropped, excluded nor still there was lost.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
TRAINED = "trained.jsonl"
SUMMARY = "summary.json"


@dataclass(frozen=True)
class Evaluation:
    """One complete evaluation. wall_s: since the run began."""

    version: int
    accuracy: float
    wall_s: float = 0.0


@dataclass(frozen=True)
class Final:
    """What the caller knows at the end. Samples are of training only.

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


def lineage(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of the surviving weights, by step.

    A trainer that resumed from a checkpoint goes back to an earlier step: what was written of
    that step and later ones before is not in the weights any more.
    """
    kept: list[dict[str, Any]] = []
    newest = 0
    for line in lines:
        epoch = int(str(line.get("epoch", newest)).partition("-")[0])
        if epoch < newest:
            # Written by a trainer that had been replaced and did not know it yet.
            continue
        newest = epoch
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
    steps, batches = lineage(metrics), lineage(trained)
    uses = Counter((task, sample) for line in batches for task, sample in line["samples"])
    excluded = sum(int(line.get("excluded", 0)) for line in batches)
    evaluations = sorted(final.evaluations, key=lambda evaluation: evaluation.version)
    gone = len(uses) + final.dropped + final.failed + excluded + final.live
    return {
        "exit_reason": final.exit_reason,
        "accuracy_before": evaluations[0].accuracy if evaluations else None,
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
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
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
