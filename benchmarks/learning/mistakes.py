"""How soon ``tidemill up`` tells of mistakes, by its CPU seconds: a Markdown table, one row a mistake.

    python benchmarks/learning/mistakes.py

Each row is a fresh folder with a small correct configuration and one mistake. Wall time depends on what else the
machine does, CPU seconds hardly; those of child processes are counted. A row fails when the exit code is not 2, when
there is more than one line, or when a service was started.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

CONFIG = {
    "run": {"name": "mistake"},
    "model": {"path": "model"},
    "train": {"name": "jsonl", "args": {"path": "prompts.jsonl"}},
    "reward": {"terms": [{"name": "exact"}]},
    "trainer": {"batch_groups": 8},
    "control": {"port": 0},
}
ROW = '{"prompt": "1+1=", "answer": "2"}\n'
MINE = "def loss(inputs, *, beta): ...\n"


@dataclass(frozen=True)
class Mistake:
    """name: for the table. overrides: arguments of ``up``. make: changes the folder. environment: more variables."""

    name: str
    overrides: tuple[str, ...] = ()
    make: Callable[[Path], object] = lambda folder: None
    environment: Mapping[str, str] = field(default_factory=dict)


MISTAKES = (
    Mistake("unknown key", ("trainer.setps=5",)),
    Mistake("a key twice", (), lambda folder: _append(folder, "run: {name: other}\n")),
    Mistake("a file that is not UTF-8", (), lambda folder: _append(folder, "# Müller\n", "latin-1")),
    Mistake("`.inf` as learning rate", ("trainer.optimizer.lr=.inf",)),
    Mistake("run name `MyRun`", ("run.name=MyRun",)),
    Mistake("a variable with one underscore", (), environment={"TIDEMILL_TRAINER_STEPS": "5"}),
    Mistake("unknown loss", ("trainer.loss.name=pppo",)),
    Mistake("unknown advantage", ("trainer.advantage.name=grpoo",)),
    Mistake("unknown engine", ("generator.engine=sglang",)),
    Mistake("unknown workflow", ("generator.workflow.name=nope",)),
    Mistake("unknown launcher", ("launcher.name=k8s",)),
    Mistake("unknown argument of vLLM", ("generator.engine=vllm", "generator.args.tensor_parallel=2")),
    Mistake("run folder that can't be made", ("run.folder=/proc/nope",)),
    Mistake("run folder is a file", ("run.folder=prompts.jsonl",)),
    Mistake("missing model folder", ("model.path=./none",)),
    Mistake("hub id, no network", ("model.path=qwen/none",), environment={"HF_ENDPOINT": "http://127.0.0.1:9"}),
    Mistake("no chat template for messages", ("train.args.chat=true",)),
    Mistake("missing file of prompts", ("train.args.path=none.jsonl",)),
    Mistake("empty file of prompts", (), lambda folder: (folder / "prompts.jsonl").write_text("")),
    Mistake("bad line 500", (), lambda folder: (folder / "prompts.jsonl").write_text(ROW * 499 + "{broken\n")),
    Mistake("missing field", ("train.args.answer=gold",)),
    Mistake("unknown argument of the dataset", ("train.args.prompts=x",)),
    Mistake("unknown task of reasoning-gym", ("train={name: reasoning_gym, args: {task: nope}}",)),
    Mistake("missing file of rewards", ("reward.terms.0.name=none.py:mine",)),
    Mistake("unknown argument of a reward", ("reward.terms.0.args={stripp: true}",)),
    Mistake("unknown argument of the loss", ("trainer.loss.args.clip_hi=0.2",)),
    Mistake("own loss that lacks an argument", ("trainer.loss.name=mine.py:loss",)),
    Mistake("a run that began with another seed", ("run.seed=8",), lambda folder: _begin(folder, {"run.seed": 7})),
)


def main() -> None:
    """Print the table; exit code 1 when a mistake was not told as it should be."""
    print("| Mistake | CPU s | Wall s | Exit code | Lines |\n| --- | ---: | ---: | ---: | ---: |")
    wrong = []
    for mistake in MISTAKES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            _prepare(folder)
            mistake.make(folder)
            cpu, wall, done = _up(folder, mistake)
            lines = (done.stdout + done.stderr).splitlines()
            print(f"| {mistake.name} | {cpu:.1f} | {wall:.1f} | {done.returncode} | {len(lines)} |", flush=True)
            if (done.returncode, len(lines)) != (2, 1) or any(folder.glob("runs/*/logs")):
                wrong.append(f"{mistake.name}: {' / '.join(lines)}")
    for line in wrong:
        print(line, file=sys.stderr)
    sys.exit(1 if wrong else 0)


def _up(folder: Path, mistake: Mistake) -> tuple[float, float, subprocess.CompletedProcess[str]]:
    """CPU seconds of ``up`` and all it started, wall seconds, and how it ended."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TIDEMILL_", "REDIS_URL"))}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "deploy.cli", "up", "config.yaml", *mistake.overrides],
        cwd=folder,
        env={**environment, **mistake.environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, wall, done


def _prepare(folder: Path) -> None:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    (folder / "prompts.jsonl").write_text(ROW * 1000)
    (folder / "mine.py").write_text(MINE)
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))


def _begin(folder: Path, fixed: dict[str, int]) -> None:
    """Leave what says with which settings the run began."""
    checkpoints = folder / "runs" / "mistake" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "RUN.json").write_text(json.dumps({"id": "0" * 32, "fixed": fixed}))


def _append(folder: Path, text: str, encoding: str = "utf-8") -> None:
    with (folder / "config.yaml").open("a", encoding=encoding) as file:
        file.write(text)


if __name__ == "__main__":
    main()
