"""Tidemill, with each of its engines, beside TRL's trainer on the same task, model and machine, in turns::

    python -m benchmarks.end_to_end --quick --json
    python -m benchmarks.end_to_end --workloads short heavy_tailed --seeds 0 1 2 --out end_to_end.jsonl

One JSON line a run goes to --out; a run that has its line already is not repeated. The model of a workload is made
once, by its warm_start. TRL has as many threads as the machine has cores, or --threads; each process of Tidemill one.
What TRL's evaluations take is taken out of its time; Tidemill's run beside the training and count.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.end_to_end.contenders import ALGORITHMS, HERE, Job, run

CONTENDERS = ("transformers", "vllm", "trl")
SHOWN = ("start_s", "samples_per_s", "samples_per_s_with_start", "tokens_per_s", "cpu_s_per_step", "peak_mb")


def jobs(settings: argparse.Namespace) -> list[Job]:
    """List all runs, contenders in turn."""
    return [
        Job(contender, workload, algorithm, lr, seed, settings.steps, settings.threads)
        for workload in settings.workloads
        for seed in settings.seeds
        for algorithm in settings.algorithms
        for lr in settings.lr
        for contender in settings.contenders
        if contender != "trl" or ALGORITHMS[algorithm].trl is not None
    ]


def medians(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make a row for each contender, workload, algorithm and learning rate: medians over the seeds."""
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for one in runs:
        found.setdefault(tuple(str(one[key]) for key in ("workload", "algorithm", "lr", "contender")), []).append(one)
    rows = []
    for (workload, algorithm, lr, contender), group in found.items():
        row = {"workload": workload, "algorithm": algorithm, "lr": float(lr), "contender": contender}
        row |= {name: median(one[name] for one in group) for name in SHOWN}
        row["seeds"] = len(group)
        row["cpu_s_per_step_by_process"] = group[0]["cpu_s_per_step_by_process"]
        for name in ("samples_to", "seconds_to"):
            row[name] = {mark: _median([one[name][mark] for one in group]) for mark in group[0][name]}
        row["accuracy_before_and_after"] = [group[0]["accuracy"][0][2], median(one["accuracy"][-1][2] for one in group)]
        rows.append(row)
    return rows


def _median(values: list[float | None]) -> float | None:
    """Return the median, None unless every seed reached it."""
    known = [value for value in values if value is not None]
    return median(known) if len(known) == len(values) else None


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=("short", "heavy_tailed"), default=["short"])
    parser.add_argument("--algorithms", nargs="+", choices=tuple(ALGORITHMS), default=["grpo"])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--lr", nargs="+", type=float, default=[4e-4])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="TRL's; 1 on a busy machine.")
    parser.add_argument("--quick", action="store_true", help="30 steps.")
    parser.add_argument("--out", type=Path, help="JSON lines of the runs; what it holds already is not run again.")
    parser.add_argument("--json", action="store_true", help="Print the medians as JSON.")
    parser.add_argument("--image", type=Path, help="A PNG of accuracy over samples and over minutes.")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="Further settings of Tidemill's.")
    settings = parser.parse_args()
    # As an exception, so that running commands are ended first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if settings.quick:
        settings.steps = 30
    for workload in settings.workloads:
        subprocess.run(
            [sys.executable, "-P", "-m", "deploy.cli", "prepare", str(HERE / f"{workload}.yaml")], check=True
        )
    done = _read(settings.out)
    runs = []
    with tempfile.TemporaryDirectory(prefix="tidemill-end-to-end-") as folder:
        for job in jobs(settings):
            known = next((one for one in done if vars(job).items() <= one.items()), None)
            result = known or run(job, Path(folder) / "run", settings.set)
            runs.append(result)
            if known is None and settings.out is not None:
                with settings.out.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(result) + "\n")
            shown = ", ".join(f"{name} {result[name]}" for name in SHOWN)
            print(f"{job.workload} {job.algorithm} {job.contender}: {shown}", file=sys.stderr, flush=True)
    if settings.image is not None:
        from benchmarks.end_to_end.plot import plot

        plot(runs, settings.image)
    rows = medians(runs)
    if settings.json:
        print(json.dumps({"benchmark": "end_to_end", "rows": rows}, indent=2))


def _read(file: Path | None) -> list[dict[str, Any]]:
    """Read the finished runs."""
    if file is None or not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
