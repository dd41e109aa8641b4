"""Judges a run's evaluations: each version once, of all its prompts, with the rewards of their own completions.

What was opened must have a result in evaluations.jsonl, unless the server was made to forget that it was opened.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from tools.chaos.judging.evidence import Log
from tools.chaos.judging.oracle import Judgement
from tools.chaos.settings import EVALUATED

Span: TypeAlias = tuple[float, float]
SMALLEST = 1e-3
"""Rewards are compared in float32."""


def unfinished(folder: Path, logs: Iterable[Log], forgotten: Sequence[Span], until: float) -> list[int]:
    """Versions whose evaluation was opened before ``until``, in no time that was forgotten, and has no result."""
    opened = {
        line.data["v"]
        for log in logs
        if log.role == "feeder"
        for line in log.lines
        if line.kind == "evaluation" and line.at <= until
        if not any(start <= line.at <= end for start, end in forgotten)
    }
    return sorted(opened - {line["version"] for line in _lines(folder / "evaluations.jsonl")})


def judge_evaluations(
    folder: Path, logs: Sequence[Log], forgotten: Sequence[Span], until: float, added: float, judgement: Judgement
) -> None:
    """Add what is wrong to a judgement. folder: the run's. forgotten: from when until when.

    until: the end of the faults. added: by a judge, to the reward of every sample.
    """
    lines = _lines(folder / "evaluations.jsonl")
    judgement.counts["evaluations"] = len(lines)
    for version in unfinished(folder, logs, forgotten, until):
        judgement.broken("evaluation", f"that of version {version} was opened and has no result")
    seen: set[int] = set()
    for line in lines:
        version = line["version"]
        if version in seen:
            judgement.broken("evaluation", f"version {version} has two results")
        seen.add(version)
        if line["scored"] + line["failed"] != line["n"] or line["n"] != EVALUATED:
            judgement.broken("evaluation", f"version {version} has a result of {line}, not of {EVALUATED} samples")
        judgement.counts["evaluated samples"] += line["scored"]
    own = _rewards(logs)
    for file in sorted((folder / "samples").glob("eval-*.jsonl")):
        for prompt in _lines(file):
            task = (prompt["version"], prompt["index"])
            for sample in prompt["samples"]:
                reward = sample["reward"]
                if reward is not None and not any(abs(reward - added - one) < SMALLEST for one in own[task]):
                    judgement.broken("wrong reward", f"prompt {task[1]} of the evaluation of version {task[0]}")


def _rewards(logs: Iterable[Log]) -> dict[tuple[int, int], list[float]]:
    """Rewards that samples of evaluations must get, by version and prompt: one for each time that it was sampled."""
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for log in logs:
        if log.role != "generator":
            continue
        for line in log.lines:
            if line.kind == "held out":
                for version, index, reward in line.data["x"]:
                    found[version, index].append(reward)
    return found


def _lines(file: Path) -> list[dict[str, Any]]:
    """Whole lines of a file, none without it."""
    found = []
    for raw in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            found.append(json.loads(raw))
        except json.JSONDecodeError:
            continue
    return found
