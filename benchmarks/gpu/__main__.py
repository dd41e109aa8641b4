"""Trainer, generator, weights and the GSM8K recipe on this machine's GPUs: ``python -m benchmarks.gpu OUT``.

Each case is a process of its own with a deadline, so that one that fails or hangs costs only its own row, and its
memory is its own. Results are kept in OUT/results.jsonl as they come: started again, only what is missing or failed is
measured. Without a GPU every case runs with a tiny model on the CPU: that shows that the command works, and no speed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.gpu.table import table
from deploy.launchers.gpus import Gpu, find_gpus
from deploy.planning.cards import CARDS, MACHINE

PARTS = ("trainer", "generator", "weights", "recipe")
CASE_DEADLINE_S = 900.0


@dataclass(frozen=True)
class Case:
    """One row of the result. command: arguments of this Python; its last line, or all it prints, is a JSON object."""

    part: str
    name: str
    command: Sequence[str]
    model: str = ""
    """Shape of the model that has to be in OUT/SHAPE before."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.sh", description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("out", type=Path, help="folder for models, runs, results.jsonl and table.md")
    parser.add_argument("--data", type=Path, help="folder with train.jsonl and test.jsonl of GSM8K; needed by recipe")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of %(default)s")
    parser.add_argument("--steps", type=int, default=12, help="steps of the recipe, of which the later half count")
    parser.add_argument(
        "--rehearse", metavar="CARDxN", help="without a GPU: all cases of N such cards (h100x2), with the tiny model"
    )
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--parts: {unknown[0]!r} is not one of {', '.join(PARTS)}")
    if "recipe" in parts and (options.data is None or not (options.data / "train.jsonl").is_file()):
        parser.error("the part recipe needs --data FOLDER with train.jsonl and test.jsonl, or --parts without it")
    if options.rehearse:
        try:
            imitate_gpus(options.rehearse, options.out / "bin")
        except ValueError as error:
            parser.error(str(error))
    gpus = find_gpus()
    small = True if options.rehearse else None
    cases = [case for case in list_cases(options.out, gpus, options.data, options.steps, small) if case.part in parts]
    run_all(cases, options.out, gpus)


def imitate_gpus(text: str, folder: Path) -> None:
    """Put a program nvidia-smi first that lists ``CARDxN``; ValueError says what that may be."""
    name, _, count = text.lower().rpartition("x")
    if name not in CARDS or not count.isdigit() or not 1 <= int(count) <= MACHINE:
        raise ValueError(f"--rehearse {text!r}: must be 1 to {MACHINE} of {', '.join(CARDS)}, such as h100x2")
    memory = CARDS[name].memory >> 20
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nfor i in $(seq 0 {int(count) - 1}); do echo $i, GPU-$i, {memory}; done\n")
    program.chmod(0o755)
    os.environ["PATH"] = f"{folder.resolve()}:{os.environ['PATH']}"


def list_cases(out: Path, gpus: Sequence[Gpu], data: Path | None, steps: int, small: bool | None = None) -> list[Case]:
    """What this machine can run: 7B as an adapter where a GPU has 70 GB or more.

    small: with the tiny model instead; by default where there is no GPU.
    """
    small = not gpus if small is None else small
    cases: list[Case] = []
    shapes = ("tiny",) if small else ("0.5B", "1.5B")
    batch = ["samples=16", "mean=30", "micro_batch_tokens=2048"] if small else ["samples=128", "mean=400", "bare=true"]
    variants: dict[str, list[str]] = {"": [], "compile": ["compile=true"]}
    if gpus:
        variants["checkpointing"] = ["activation_checkpointing=true"]
    trainers = [(shape, name, extra) for shape in shapes for name, extra in variants.items()]
    if any((gpu.memory_gb or 0) >= 70 for gpu in gpus):
        trainers.append(("tiny" if small else "7B", "LoRA", ['lora={"rank": 32}', "activation_checkpointing=true"]))
    for shape, name, extra in trainers:
        command = ["-m", "benchmarks.gpu.trainer_step", shape, str(out / shape), *batch, *extra]
        cases.append(Case("trainer", f"{shape} {name}".strip(), command))
    for shape in shapes:
        sizes = ["--concurrency", "256", "--samples", "1024", "--tokens", "512", "--rounds", "3"]
        sizes = ["--concurrency", "8", "--samples", "16", "--tokens", "16", "--rounds", "1"] if small else sizes
        model = ["--model", str(out / shape), "--dtype", "float32" if small else "bfloat16", "--json"]
        cases.append(Case("generator", shape, ["-m", "deploy.cli", "bench", "generator", *sizes, *model], shape))
    for size, engine in (("1M", "transformers"),) if small else (("500M", "vllm"),):
        for kind in ("file", "peer"):
            chosen = ["--models", size, "--transports", kind, "--rounds", "3", "--engine", engine, "--json"]
            cases.append(Case("weights", f"{size} {kind}", ["-m", "deploy.cli", "bench", "weights", *chosen]))
    if data is not None:
        for shape, name, extra in list_recipes(gpus, small):
            command = ["-m", "benchmarks.gpu.recipe", shape, str(out / f"recipe-{shape}"), str(steps), str(data)]
            cases.append(Case("recipe", f"{shape} {name}", [*command, *extra]))
    return cases


def list_recipes(gpus: Sequence[Gpu], small: bool) -> list[tuple[str, str, list[str]]]:
    """Shape, name and settings of the whole runs."""
    if not small:
        return _list_recipes(gpus)
    less = ["sampling.max_tokens=16", "eval.sampling.max_tokens=16", "trainer.batch_groups=4", "model.dtype=float32"]
    less += ["generator.engine=transformers", "generator.args={}"]
    found = {name: settings for _, name, settings in _list_recipes(gpus)} if gpus else {"CPU": []}
    return [("tiny", name, [*settings, *less]) for name, settings in found.items()]


def _list_recipes(gpus: Sequence[Gpu]) -> list[tuple[str, str, list[str]]]:
    # In turns vLLM may have all of a GPU but what the trainer's process keeps, such as the context of CUDA.
    share = ["generator.args.gpu_memory_utilization=0.85"]
    every = f"0-{len(gpus) - 1}" if len(gpus) > 1 else "0"
    both = [f"trainer.processes={len(gpus)}", f"generator.replicas={len(gpus)}"]
    turns = [*share, *both, f"placement={{trainer: '{every}', generator: '{every}'}}"]
    if len(gpus) == 1:
        return [("0.5B", "1 GPU", []), ("1.5B", "1 GPU", []), ("0.5B", "1 GPU in turns", turns)]
    share = ["generator.args.gpu_memory_utilization=0.9"]
    half = len(gpus) // 2
    split = [*share, f"trainer.processes={half}", f"generator.replicas={len(gpus) - half}"]
    whole = f"{len(gpus)} GPUs"
    return [("0.5B", whole, split), ("1.5B", whole, split), ("0.5B", f"{whole} in turns", turns)]


def run_all(cases: Sequence[Case], out: Path, gpus: Sequence[Gpu]) -> None:
    """Measure what is missing, and write the table."""
    out.mkdir(parents=True, exist_ok=True)
    results = out / "results.jsonl"
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.is_file() else []
    known = {(row["part"], row["name"]) for row in rows if "failed" not in row}
    missing = [case for case in cases if (case.part, case.name) not in known]
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, results.open("a", encoding="utf-8") as file:
        bar = progress.add_task("cases", total=len(missing))
        for case in missing:
            progress.update(bar, description=f"{case.part} {case.name}")
            row = {"part": case.part, "name": case.name, **measure(case, out)}
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            if "failed" in row:
                progress.console.print(f"{case.part} {case.name} failed: {row['failed']}")
            progress.advance(bar)
    text = f"{describe(gpus)}\n\n{table(newest(rows))}"
    (out / "table.md").write_text(text, encoding="utf-8")
    print(text)


def newest(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of each case the row that was measured last."""
    return list({(row["part"], row["name"]): row for row in rows}.values())


def measure(case: Case, out: Path) -> dict[str, Any]:
    """Return the figures of a case, or in ``failed`` why it has none, with its log."""
    log = out / f"{case.part}-{case.name.replace(' ', '-')}.log"
    try:
        with log.open("w", encoding="utf-8") as errors:
            if case.model:
                # In a process of its own, since a process that has used a GPU keeps some of its memory.
                make = [sys.executable, "-m", "benchmarks.gpu.shapes", str(out / case.model), case.model]
                subprocess.run(make, stdout=errors, stderr=errors, timeout=CASE_DEADLINE_S, check=True)
            done = subprocess.run(
                [sys.executable, *case.command],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                timeout=CASE_DEADLINE_S,
                check=False,
            )
    except subprocess.CalledProcessError as error:
        return {"failed": f"no model was made, exit code {error.returncode}, see {log}"}
    except subprocess.TimeoutExpired:
        return {"failed": f"not done within {CASE_DEADLINE_S:.0f} s, see {log}"}
    if done.returncode:
        return {"failed": f"exit code {done.returncode}, see {log}"}
    try:
        # A benchmark prints one object over many lines, the modules here one line after what libraries print.
        printed = done.stdout.strip()
        found: dict[str, Any] = json.loads(printed if printed.startswith("{") else printed.splitlines()[-1])
    except (json.JSONDecodeError, IndexError):
        return {"failed": f"it printed no figures, see {log}"}
    return found["rows"][0] if "rows" in found else found


def describe(gpus: Sequence[Gpu]) -> str:
    """The machine and what runs on it, in one line."""
    import torch

    card = f"{len(gpus)} x {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "no GPU, tiny models"
    return (
        f"{time.strftime('%Y-%m-%d')}, {card}, CUDA {torch.version.cuda}, torch {torch.__version__},"
        f" vllm {_version('vllm')}, Python {platform.python_version()}, tidemill {_version('tidemill')}"
    )


def _version(package: str) -> str:
    for name in (package, f"{package}-cpu"):
        try:
            return version(name)
        except ModuleNotFoundError:
            continue
    return "none"


if __name__ == "__main__":
    main()
