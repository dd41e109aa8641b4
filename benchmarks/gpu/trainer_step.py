"""The trainer's whole step on one device: tokens a second, share of the hardware's peak, and memory beside the plan.

``python -m benchmarks.gpu.trainer_step SHAPE FOLDER [SETTING=VALUE ...]`` prints one JSON line. ``limit`` is forward
and backward of the same packed tokens through the bare model with the plainest cross-entropy, and no optimizer, where
that fits in memory.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from transformers import Qwen2ForCausalLM

from benchmarks.gpu.shapes import SHAPES, make_model
from benchmarks.harness.trajectories import GROUP, random_groups
from consumers.trainer.data.packed import pack
from consumers.trainer.metrics.throughput import device_name, peak_flops
from consumers.trainer.model.packing import choose_kernel, switch_to_packing
from consumers.trainer.step.build import build_train_step
from deploy.planning.changes import rehearse_apart
from deploy.planning.fit import PARTS, total
from schemas.config import parse_config

PROMPT, SPREAD, LONGEST = 100, 0.8, 2048
ROUNDS = 5
GB = 1 << 30


def timed(work: Callable[[], Any], rounds: int) -> list[float]:
    """Seconds of each round, after one that does not count."""
    seconds = []
    for _ in range(rounds + 1):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


def measure(
    shape: str, folder: Path, overrides: dict[str, Any], samples: int, mean: float, bare: bool
) -> dict[str, Any]:
    """One row. overrides: settings below ``trainer``."""
    make_model(folder, shape)
    config = parse_config(
        {
            "model": {"path": str(folder), "dtype": "bfloat16", "max_length": LONGEST},
            "train": {"name": "arithmetic"},
            "reward": {"terms": [{"name": "exact"}]},
            "sampling": {"n": GROUP, "max_tokens": LONGEST - PROMPT},
            "trainer": {"micro_batch_tokens": 16384, **overrides},
        }
    )
    groups = random_groups(samples, PROMPT, mean, SPREAD, LONGEST, SHAPES[shape]["vocab_size"])
    tokens = sum(len(t.tokens) for group in groups for t, _ in group.samples)
    step = build_train_step(config)
    phases: list[dict[str, float]] = []
    flops: list[float] = []

    def run() -> None:
        batch = step.planner.plan(groups).batch()
        result = step.run(batch, version=0)
        phases.append(dict(result.seconds))
        flops.append(float(result.metrics["forward_flops"]))

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = timed(run, ROUNDS)
    peak = torch.cuda.max_memory_allocated() / GB if on_gpu else None
    planned = rehearse_apart(config, 1)
    best_possible = peak_flops(device_name())
    row: dict[str, Any] = {
        "shape": shape,
        "settings": overrides,
        "device": device_name() or "cpu",
        "kernel": choose_kernel(step.policy.device, torch.bfloat16),
        "packed": step.policy.packed,
        "samples": samples,
        "tokens": tokens,
        "seconds": median(seconds),
        "tokens_per_s": tokens / median(seconds),
        "mfu": 3 * flops[-1] / median(seconds) / best_possible if best_possible else None,
        "phases": {name: round(median(p[name] for p in phases[1:]), 4) for name in phases[-1]},
        "peak_gb": peak,
        "planned_gb": total(planned) / GB,
        "planned": {part: planned[part] / GB for part in PARTS},
    }
    if bare:
        micro_batches, device = step.planner.plan(groups).batch().micro_batches, step.policy.device
        del step, run
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        row |= bare_limit(folder, micro_batches, device, tokens)
    return row


def bare_limit(folder: Path, micro_batches: Sequence[Any], device: torch.device, tokens: int) -> dict[str, Any]:
    """Forward and backward through the bare model in bfloat16 on the same packs."""
    model: Any = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.to(device)
    switch_to_packing(model)
    packed = []
    for micro in micro_batches:
        moved = micro.to(device)
        found = pack(moved.tokens[:, :-1], moved.lengths)
        packed.append((found, found.tokens_of(moved.targets)))

    def run() -> None:
        model.zero_grad(set_to_none=True)
        for found, targets in packed:
            logits = model(**found.arguments(), use_cache=False).logits[0]
            F.cross_entropy(logits, targets).backward()

    try:
        seconds = timed(run, ROUNDS)
    except torch.cuda.OutOfMemoryError:
        return {"limit": "out of memory"}
    peak = torch.cuda.max_memory_allocated() / GB if torch.cuda.is_available() else None
    return {"limit_tokens_per_s": tokens / median(seconds), "limit_peak_gb": peak}


def main() -> None:
    shape, folder, *settings = sys.argv[1:]
    values = {name: json.loads(value) for name, value in (text.split("=", 1) for text in settings)}
    samples, mean = int(values.pop("samples", 64)), float(values.pop("mean", 400))
    bare = bool(values.pop("bare", False))
    print(json.dumps(measure(shape, Path(folder), values, samples, mean, bare)))


if __name__ == "__main__":
    main()
