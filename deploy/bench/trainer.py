"""``tidemill bench trainer``: our optimizer step beside TRL's on the same trajectories, and beside the bare limit.

Each contender is a process of its own (deploy/bench/trainer_worker.py), so that its peak memory is its own; they
take turns, so that a busy machine slows all of them. Figures are medians over the rounds.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from schemas.errors import InfraError

CONTENDERS = ("ours", "limit", "trl")
STEP_DEADLINE_S = 1800.0


class Contender:
    """A worker process that makes one step at a time."""

    def __init__(self, name: str, folder: str, samples: int, micro_batch_tokens: int, threads: int) -> None:
        self.name = name
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "deploy.bench.trainer_worker", name, folder, str(samples)]
        self._process = subprocess.Popen(
            [*command, str(micro_batch_tokens)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def step(self) -> dict[str, float]:
        """Make one step: ``seconds``, ``cpu_seconds``, its ``tokens``, and the process's ``peak_rss_mb`` so far."""
        process = self._process
        if process.stdin is None or process.stdout is None:
            raise InfraError(f"{self.name} has no pipes")
        process.stdin.write("step\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], STEP_DEADLINE_S)
        line = process.stdout.readline() if ready else ""
        if not line:
            raise InfraError(f"{self.name} made no step within {STEP_DEADLINE_S:.0f} s, or ended; see what it printed")
        figures: dict[str, float] = json.loads(line)
        return figures

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def measure(
    samples: int, rounds: int, micro_batch_tokens: int, threads: int, advance: Callable[[int], None]
) -> dict[str, Any]:
    """One row: tokens a second of ours, and ratios; those with TRL are None where it is not installed."""
    names = [name for name in CONTENDERS if name != "trl" or importlib.util.find_spec("trl")]
    with tempfile.TemporaryDirectory(prefix="tidemill-bench-") as folder:
        contenders: list[Contender] = []
        found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        try:
            for name in names:
                contenders.append(Contender(name, folder, samples, micro_batch_tokens, threads))
                # The first step allocates; it also makes the model's folder, one process after the other.
                contenders[-1].step()
                advance(1)
            for _ in range(rounds):
                for contender in contenders:
                    found[contender.name].append(contender.step())
                    advance(1)
        finally:
            for contender in contenders:
                contender.close()
    return _row(found, threads)


def _row(found: dict[str, list[dict[str, float]]], threads: int) -> dict[str, Any]:
    ours, limit = found["ours"], found["limit"]
    against = {name: _ratios(ours, found[name]) for name in found if name != "ours"}
    peak = ours[-1]["peak_rss_mb"]
    return {
        "threads": threads,
        "rounds": len(ours),
        "tokens": int(ours[0]["tokens"]),
        "tokens_per_s": median(step["tokens"] / step["seconds"] for step in ours),
        "limit_tokens_per_s": median(step["tokens"] / step["seconds"] for step in limit),
        "vs_trl": median(against["trl"]) if "trl" in against else None,
        "vs_trl_range": [min(against["trl"]), max(against["trl"])] if "trl" in against else None,
        "vs_trl_cpu": median(_ratios(ours, found["trl"], "cpu_seconds")) if "trl" in found else None,
        "vs_limit": median(against["limit"]),
        "vs_limit_range": [min(against["limit"]), max(against["limit"])],
        "vs_limit_cpu": median(_ratios(ours, limit, "cpu_seconds")),
        "peak_rss_mb": peak,
        "limit_peak_rss_mb": limit[-1]["peak_rss_mb"],
        "trl_peak_rss_mb": found["trl"][-1]["peak_rss_mb"] if "trl" in found else None,
        "peak_rss_vs_limit": peak / limit[-1]["peak_rss_mb"],
    }


def _ratios(ours: Sequence[dict[str, float]], other: Sequence[dict[str, float]], key: str = "seconds") -> list[float]:
    """How many times as fast ours is, turn by turn; by processor time when others have most of the machine."""
    return [theirs[key] / own[key] for own, theirs in zip(ours, other, strict=True)]
