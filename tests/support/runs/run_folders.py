"""Folders of runs as trainers leave them, made in a moment: figures, groups, evaluations, logs, configuration."""

import json
import math
from pathlib import Path
from typing import Any

import yaml

SETTINGS: dict[str, Any] = {
    "model": {"path": "tiny"},
    "train": {"name": "arithmetic"},
    "reward": {"terms": [{"name": "exact"}]},
    "broker": {"url": "redis://me:hidden@somewhere:6379/0"},
    "trainer": {"steps": 40, "optimizer": {"lr": 1e-5}},
}


def make_run(
    folder: Path,
    steps: int = 40,
    state: str = "finished",
    lr: float = 1e-5,
    groups: int = 2,
    described: dict[str, Any] | None = None,
) -> Path:
    """A run with so many steps; its reward rises with the learning rate. described: its tags and notes."""
    (folder / "logs").mkdir(parents=True)
    (folder / "samples").mkdir()
    settings = {**SETTINGS, "run": {"name": folder.name, **(described or {})}}
    settings["trainer"] = {**SETTINGS["trainer"], "optimizer": {"lr": lr}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    lines = [metrics_line(step, lr) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept = [group_line(step, task, 4) for step in range(1, steps + 1) for task in range(groups)]
    (folder / "samples" / "train-00000001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    for version, mean in ((0, 0.25), (steps, 0.75)):
        line = {"version": version, "n": 4, "scored": 4, "failed": 0, "off_version": 0, "mean": mean}
        with (folder / "evaluations.jsonl").open("a") as stream:
            stream.write(json.dumps(line | {"length": 5.0, "time": 1e9 + version, "wall_s": 3.0 * version}) + "\n")
        prompts = [prompt_line(version, index, mean) for index in range(4)]
        file = folder / "samples" / f"eval-{version:08d}.jsonl"
        file.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (folder / "logs" / "trainer.log").write_text(
        "".join(
            json.dumps({"event": f"step {step}", "level": "info", "timestamp": f"2026-01-01T00:00:{step % 60:02d}Z"})
            + "\n"
            for step in range(steps)
        )
        + json.dumps({"event": "a tracker is given up", "level": "warning", "timestamp": "2026-01-01T00:01:00Z"})
        + "\n"
    )
    if state:
        summary = {"exit_reason": state, "steps": steps, "reward_before": 0.25, "reward_after": 0.75}
        (folder / "summary.json").write_text(json.dumps(summary))
    used = [resource_line(10.0 * at) for at in range(steps)]
    (folder / "resources.jsonl").write_text("".join(json.dumps(line) + "\n" for line in used))
    fired = {"time": 1e9, "name": "no_progress", "fired": True, "level": "error", "text": "no step for 15 minutes"}
    (folder / "alerts.jsonl").write_text(
        json.dumps(fired) + "\n" + json.dumps(fired | {"time": 1e9 + 60, "fired": False}) + "\n"
    )
    (folder / "environment.json").write_text(
        json.dumps({"python": "3.12.1", "gpus": [], "packages": {"torch": "2.13"}, "git": {"commit": "abc1234"}})
    )
    return folder


def resource_line(at: float) -> dict[str, Any]:
    names = ("trainer", "generator-0", "reward-0", "feeder")
    services = {name: {"cpu": 1.0 / (index + 1), "memory_bytes": 1e9 + at * 1e6} for index, name in enumerate(names)}
    return {
        "time": 1e9 + at,
        "services": services,
        "queues": {"tasks": int(at) % 70, "scored": 4},
        "broker_bytes": 10**7,
    }


def metrics_line(step: int, lr: float = 1e-5) -> dict[str, Any]:
    return {
        "step": step,
        "version": step,
        "wall_s": 2.5 * step,
        "trajectories": 8,
        "reward/mean": 1 - math.exp(-step * lr * 3e3),
        "reward/exact/mean": 0.5,
        "train/entropy": 1 / step,
        "train/grad_norm": 0.1 * (1 + step % 3),
        "staleness/histogram": {"0": 5, "1": 3},
    }


def sample_line(sample: int, reward: float, text: str) -> dict[str, Any]:
    return {
        "sample": sample,
        "completion": text,
        "reward": reward,
        "terms": {"exact": reward, "length": -0.1 * sample},
        "advantage": reward - 0.5,
        "tokens": 3 + sample,
        "finish": "length" if sample == 3 else "stop",
        "oldest_version": 0,
        "newest_version": 1,
        "generator": "generator-0",
        "seconds": 0.5,
    }


def group_line(step: int, task: int, samples: int) -> dict[str, Any]:
    """A group whose first ``task`` samples are right."""
    texts = [f"{step} and {task} make {step + task + (0 if k < task + 1 else k)}" for k in range(samples)]
    return {
        "step": step,
        "version": step - 1,
        "task_id": 10 * step + task,
        "prompt": f"What is {step} plus {task}?",
        "data": {"answer": str(step + task)},
        "samples": [
            sample_line(k, float(k < task + 1), texts[k]) | {"trace": trace_of(step, task, k)} for k in range(samples)
        ],
    }


def trace_of(step: int, task: int, sample: int) -> list[dict[str, Any]]:
    """The trace of a sample: two attempts of generators, the reward, and the step, which ends for all at once."""
    begin = 1000.0 + 10 * step
    parts = [
        ("admitted", "", task, task),
        ("attempt", "generator-0", task, task + 1),
        ("attempt", "generator-1", task + 2, task + 3 + sample),
        ("term", "exact", task + 3 + sample, task + 3.5 + sample),
        ("step", str(step), 9, 10),
    ]
    return [
        {"kind": kind, "name": name, "start": begin + start, "end": begin + end, "tokens": 0, "failed": one == 1}
        for one, (kind, name, start, end) in enumerate(parts)
    ]


def prompt_line(version: int, index: int, mean: float) -> dict[str, Any]:
    right = index < 4 * mean
    return {
        "version": version,
        "index": index,
        "dataset": "heldout",
        "prompt": f"Held-out question {index}",
        "data": {"answer": str(index)},
        "samples": [sample_line(0, float(right), f"It is {index if right else -1}") | {"advantage": None}],
    }
