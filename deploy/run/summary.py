"""The metrics of a finished run in summary.json.

They come from the trainer's own logs, and are compared with the broker's last counts: a sample that was published but
neither trained, dropped, excluded nor still in the pipeline was lost.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.export.plot import Evaluation
from schemas.errors import DiskError
from schemas.run_folder import METRICS, SUMMARY, TRAINED, StoredLines, surviving_lines


@dataclass(frozen=True)
class Final:
    """Metrics that the logs do not hold, from the broker and the caller. Samples are of training only.

    published: first deliveries. dropped, failed: published samples of groups that ended untrained.
    live: published samples of groups that are still in the pipeline. phases_s: seconds by phase. devices_s: of devices
    by role and use. trainer_steps: an order's, None if it stayed as configured.
    Without ``published`` (the broker did not answer any more) what was lost is unknown.
    """

    exit_reason: str
    published: int | None = None
    dropped: int = 0
    failed: int = 0
    live: int = 0
    dropped_equal: int = 0
    dropped_stale: int = 0
    tokens_generated: int = 0
    devices_s: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    evaluations: Sequence[Evaluation] = ()
    trainer_steps: int | None = None
    phases_s: Mapping[str, float] = field(default_factory=dict)


def figure(line: Mapping[str, Any], name: str) -> float | None:
    """Return a step's metric, which may be filed under ``train/``; None when it is not there."""
    value = line.get(name, line.get(f"train/{name}"))
    return None if value is None else float(value)


class SampleCounts:
    """How many samples were trained, and how often again. Each sample has one bit, in pages of PAGE tasks."""

    PAGE = 8192

    def __init__(self) -> None:
        self.distinct = 0
        self.again = 0
        self._pages: dict[tuple[int, int], bytearray] = {}

    def add(self, task: int, sample: int) -> None:
        """Count a trained sample: as distinct, or as trained again."""
        page, place = divmod(task, self.PAGE)
        bits = self._pages.get((page, sample))
        if bits is None:
            bits = self._pages[page, sample] = bytearray(self.PAGE // 8)
        mask = 1 << place % 8
        if bits[place // 8] & mask:
            self.again += 1
        else:
            bits[place // 8] |= mask
            self.distinct += 1


def summarise(metrics: Iterable[dict[str, Any]], trained: Iterable[dict[str, Any]], final: Final) -> dict[str, Any]:
    """Return the summary, from all lines of both logs, which are looped over more than once."""
    steps, excluded, samples = 0, 0, SampleCounts()
    for line in surviving_lines(trained):
        steps += 1
        excluded += int(line.get("excluded", 0))
        for task, sample in line["samples"]:
            samples.add(task, sample)
    version, tokens, oldest = -1, 0.0, 0
    totals, weights = defaultdict[str, float](float), defaultdict[str, float](float)
    for line in surviving_lines(metrics):
        version = max(version, int(line["version"]))
        tokens += figure(line, "tokens") or 0
        oldest = max(oldest, int(line.get("staleness/max", 0)))
        # Means are over tokens, not over steps.
        for name, weight in (("staleness/mean", "tokens"), ("logprob_gap_mean", "logprob_gap_tokens")):
            value, count = figure(line, name), figure(line, weight)
            if value is not None and count:
                totals[name] += value * count
                weights[name] += count
    means = {name: total / weights[name] for name, total in totals.items()}
    wall_s, phases_s = _times(metrics, final)
    evaluations = sorted(final.evaluations, key=lambda evaluation: evaluation.version)
    # Weights that were trained already say nothing of how it was before.
    before = evaluations[0] if evaluations and evaluations[0].version == 0 else None
    after = evaluations[-1] if evaluations else None
    gone = samples.distinct + final.dropped + final.failed + excluded + final.live
    return {
        "exit_reason": final.exit_reason,
        "reward_before": before and before.reward,
        "reward_after": after and after.reward,
        "accuracy_before": before and before.accuracy,
        "accuracy_after": after and after.accuracy,
        "steps": steps,
        "trainer_steps": final.trainer_steps,
        "versions_published": version + 1,
        "trajectories": final.published,
        "trajectories_trained": samples.distinct,
        "trajectories_trained_twice": samples.again,
        # Fewer deliveries than ends: the counts are of another run, such as the one that this run was forked from.
        "trajectories_lost": None if final.published is None or final.published < gone else final.published - gone,
        "trajectories_dropped_equal": final.dropped_equal,
        "trajectories_dropped_stale": final.dropped_stale,
        "trajectories_excluded": excluded,
        "tokens_generated": final.tokens_generated,
        "tokens_trained": int(tokens),
        "max_staleness": oldest,
        "mean_staleness": means.get("staleness/mean"),
        "logprob_gap_mean": means.get("logprob_gap_mean"),
        "wall_s": round(wall_s, 3),
        "device_s_by_use": {
            role: {use: round(seconds, 1) for use, seconds in uses.items()} for role, uses in final.devices_s.items()
        },
        "wall_s_by_phase": {name: round(seconds, 3) for name, seconds in phases_s.items()},
    }


def _times(metrics: Iterable[dict[str, Any]], final: Final) -> tuple[float, dict[str, float]]:
    """Return the run's seconds, whole and by phase, of all steps, also of those that were trained again."""
    wall_s, phases_s = 0.0, dict(final.phases_s)
    for line in metrics:
        wall_s = float(line["wall_s"])
        for name, spent in line.items():
            if name.startswith("time/"):
                phase = "trainer/" + name.removeprefix("time/").removesuffix("_s")
                phases_s[phase] = phases_s.get(phase, 0.0) + float(spent)
    return wall_s, phases_s


def write_summary(folder: Path, final: Final) -> dict[str, Any]:
    """Summarise the run in ``folder`` and write summary.json there."""
    summary = summarise(StoredLines(folder / METRICS), StoredLines(folder / TRAINED), final)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise DiskError(f"cannot write {folder / SUMMARY}: {error.strerror}") from error
    return summary
