"""A run of a contender, from its command to its figures."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.end_to_end.process_meter import Usage, measure

HERE = Path(__file__).parent
MARKS = (0.8, 0.9)
"""Held-out accuracies whose time and samples are reported."""
DEADLINE_S = 3600.0


@dataclass(frozen=True)
class Algorithm:
    """Prompts of a step and samples of each, Tidemill's advantage, and TRL's trainer (None: it has none)."""

    prompts: int
    samples: int
    settings: dict[str, Any]
    trl: str | None

    @property
    def step(self) -> int:
        return self.prompts * self.samples


ALGORITHMS = {
    # TRL also trains groups with equal rewards.
    "grpo": Algorithm(32, 8, {"name": "grpo", "keep_zero_variance": True}, "grpo"),
    "rloo": Algorithm(128, 2, {"name": "rloo", "keep_zero_variance": True}, "rloo"),
    "raw": Algorithm(256, 1, {"name": "raw"}, None),
}


@dataclass(frozen=True)
class Job:
    """A job: contender (a Tidemill engine, or trl), workload, algorithm, learning rate, seed and steps.

    threads: of TRL's one process; Tidemill's have one each.
    """

    contender: str
    workload: str
    algorithm: str
    lr: float
    seed: int
    steps: int
    threads: int

    @property
    def config(self) -> Path:
        return HERE / f"{self.workload}.yaml"


@dataclass
class Curve:
    """A run over its steps. seconds: since its command, at the end of each step. accuracy: of weight versions."""

    seconds: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, float] = field(default_factory=dict)
    accuracy: dict[int, float] = field(default_factory=dict)


def run(job: Job, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Run one job and return its figures. overrides: further settings of Tidemill's configuration."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    make = _run_trl if job.contender == "trl" else _run_tidemill
    return {**vars(job), **make(job, folder, overrides)}


def _run_tidemill(job: Job, folder: Path, overrides: list[str]) -> dict[str, Any]:
    algorithm = ALGORITHMS[job.algorithm]
    settings = [
        f"run.folder={folder / 'run'}",
        f"run.seed={job.seed}",
        f"generator.engine={job.contender}",
        f"sampling.n={algorithm.samples}",
        f"trainer.batch_groups={algorithm.prompts}",
        f"trainer.steps={job.steps}",
        f"trainer.optimizer.lr={job.lr}",
        f"trainer.advantage={json.dumps(algorithm.settings)}",
        "trainer.loss.name=ppo",
        "warm_start=null",
        *overrides,
    ]
    command = [sys.executable, "-P", "-m", "deploy.cli", "up", str(job.config), *settings]
    metrics = folder / "run" / "metrics.jsonl"
    first: list[float] = []

    def look(now: float) -> None:
        if not first and metrics.is_file() and metrics.stat().st_size:
            first.append(now)

    usage = measure(command, dict(os.environ), folder / "log", DEADLINE_S, look)
    steps = [line for line in _lines(metrics) if "wall_s" in line]
    # The run's clock, shifted to the start of the command.
    moved = first[0] - steps[0]["wall_s"]
    curve = Curve(
        {line["step"]: line["wall_s"] + moved for line in steps},
        {line["step"]: line["train/tokens"] for line in steps},
        {line["version"]: line["mean"] for line in _lines(folder / "run" / "evaluations.jsonl")},
    )
    begin, end = curve.seconds[1], curve.seconds[job.steps]
    cpu = {name: seconds / (job.steps - 1) for name, seconds in usage.between(begin, end).items()}
    return _figures(curve, algorithm, usage, cpu)


def _run_trl(job: Job, folder: Path, overrides: list[str]) -> dict[str, Any]:
    algorithm = ALGORITHMS[job.algorithm]
    out = folder / "steps.jsonl"
    numbers = [algorithm.prompts, algorithm.samples, job.steps, job.lr, job.seed, job.threads, time.time()]
    command = [sys.executable, "-m", "benchmarks.end_to_end.trl_run", str(job.config), str(out), str(algorithm.trl)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(job.threads)}
    usage = measure([*command, *map(str, numbers)], environment, folder / "log", DEADLINE_S, lambda _: None)
    lines = [line for line in _lines(out)]
    curve = Curve(
        {line["step"]: line["wall_s"] for line in lines},
        {line["step"]: line["tokens"] for line in lines},
        {line["step"]: line["accuracy"] for line in lines if line["accuracy"] is not None},
    )
    cpu = (lines[-1]["cpu_s"] - lines[1]["cpu_s"]) / (job.steps - 1)
    return _figures(curve, algorithm, usage, {"main": cpu})


def _figures(curve: Curve, algorithm: Algorithm, usage: Usage, cpu: dict[str, float]) -> dict[str, Any]:
    last = max(curve.seconds)
    after_start = curve.seconds[last] - curve.seconds[1]
    reached = {
        str(mark): min((version for version, mean in curve.accuracy.items() if mean >= mark), default=None)
        for mark in MARKS
    }
    return {
        "start_s": round(curve.seconds[1], 2),
        "samples_per_s": round((last - 1) * algorithm.step / after_start, 1),
        "samples_per_s_with_start": round(last * algorithm.step / curve.seconds[last], 1),
        "tokens_per_s": round(sum(n for step, n in curve.tokens.items() if step > 1) / after_start, 1),
        "cpu_s_per_step": round(sum(cpu.values()), 4),
        "cpu_s_per_step_by_process": {name: round(value, 4) for name, value in sorted(cpu.items())},
        "peak_mb": round(usage.peak_mb),
        "samples_to": {mark: v * algorithm.step if v is not None else None for mark, v in reached.items()},
        "seconds_to": {mark: _at(curve, v) for mark, v in reached.items()},
        "accuracy": sorted([v, round(_at(curve, v) or 0.0, 1), mean] for v, mean in curve.accuracy.items()),
    }


def _at(curve: Curve, version: int | None) -> float | None:
    """Return the seconds at which each weight version was ready."""
    return None if version is None else round(curve.seconds.get(version, curve.seconds[1]), 2)


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
