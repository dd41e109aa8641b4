"""A whole run of the GSM8K recipe with a random model, on all GPUs of this machine: where a step's seconds go.

``python -m benchmarks.gpu.recipe SHAPE FOLDER STEPS DATA [SETTING=VALUE ...]`` prints one JSON line. DATA is a folder
with train.jsonl and test.jsonl of GSM8K. A random model never ends an answer by itself: every completion has
sampling.max_tokens tokens.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu.shapes import make_model

RUN_DEADLINE_S = 560.0
CONFIG = Path(__file__).parents[2] / "examples" / "gsm8k" / "config.yaml"


def measure(shape: str, folder: Path, steps: int, data: Path, settings: list[str]) -> dict[str, Any]:
    """Medians over the run's later half of steps."""
    make_model(folder / "model", shape)
    run = folder / f"run-{time.time_ns()}"
    command = [
        *(sys.executable, "-m", "deploy.cli", "up", str(CONFIG)),
        *(f"run.folder={run}", "run.name=gpu", f"model.path={folder / 'model'}"),
        *(f"train.args.path={data.resolve()}", f"eval.dataset.args.path={data.resolve()}", "eval.dataset.limit=64"),
        *(f"trainer.steps={steps}", "trainer.advantage.keep_zero_variance=true", *settings),
    ]
    began = time.time()
    done = subprocess.run(command, timeout=RUN_DEADLINE_S, check=False, capture_output=True, text=True)
    lines = [json.loads(line) for file in run.rglob("metrics.jsonl") for line in file.read_text().splitlines()]
    if done.returncode or not lines:
        tail = (done.stdout + done.stderr)[-3000:]
        return {"shape": shape, "settings": settings, "failed": done.returncode, "output": tail}
    later = lines[len(lines) // 2 :]

    def typical(name: str) -> float | None:
        values = [line[name] for line in later if name in line]
        return round(median(values), 6) if values else None

    names = sorted({name for line in later for name in line if name.startswith(("time/", "perf/", "staleness/m"))})
    gap = [name for name in sorted(later[-1]) if "logprob_gap" in name or name in ("train/ratio_max", "train/kl")]
    return {
        "shape": shape,
        "settings": settings,
        "seconds": round(time.time() - began, 1),
        "steps": len(lines),
        "figures": {
            name: typical(name) for name in [*names, *gap, "train/tokens", "train/length_mean", "trajectories"]
        },
        "first_step_s": round(lines[0].get("wall_s", 0.0), 1),
        "losses": [round(line["train/loss"], 6) for line in lines[:3]],
    }


def main() -> None:
    shape, folder, steps, data, *settings = sys.argv[1:]
    print(json.dumps(measure(shape, Path(folder), int(steps), Path(data), settings)))


if __name__ == "__main__":
    main()
