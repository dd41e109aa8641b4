"""What a load of new weights costs requests in flight, beside the bare copy of these weights into a model."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from safetensors import safe_open

from deploy.bench.weights_model import WIRE
from producers.engines.base import Completion, Engine, EngineSettings
from producers.engines.factory import make_engine
from schemas.messages import FileSource, Sampling

REQUESTS = 4
"""In flight while weights are loaded."""
SAME_STEP_S = 0.0005
"""Tokens of one step of the engine come closer together."""
TOKENS_DEADLINE_S = 300.0


async def load_times(name: str, model: Path, file: Path, rounds: int) -> tuple[float, float]:
    """Seconds to copy the file into a model by the plainest code, and that running requests miss for a load."""
    settings = EngineSettings(model_path=str(model), dtype=WIRE, max_length=1024, max_samples=REQUESTS, report_every=1)
    engine: Engine = make_engine(name, settings, Path())
    await engine.start()
    try:
        pauses = [await _pause(engine, file, version) for version in range(1, rounds + 1)]
    finally:
        await engine.close()
    return min(_apply(file) for _ in range(rounds + 1)), median(pauses)


async def _pause(engine: Engine, file: Path, version: int) -> float:
    """The longest time between two tokens around a load, less the usual one."""
    times: list[float] = []
    came = asyncio.Event()

    def heard(index: int, completion: Completion) -> None:
        times.append(time.perf_counter())
        came.set()

    async def more() -> None:
        wanted = len(times) + 16 * REQUESTS
        async with asyncio.timeout(TOKENS_DEADLINE_S):
            while len(times) < wanted:
                came.clear()
                await came.wait()

    sampling = Sampling(max_tokens=900)
    running = [asyncio.create_task(engine.generate([5, 6, 7], sampling, progress=heard)) for _ in range(REQUESTS)]
    await more()
    started = time.perf_counter()
    await engine.load(FileSource(file), version)
    loaded = time.perf_counter()
    await more()
    await engine.abort_all()
    await asyncio.gather(*running)
    gaps = [(before, after) for before, after in pairwise(times) if after - before > SAME_STEP_S]
    usual = median(after - before for before, after in gaps)
    return max(after - before for before, after in gaps if before < loaded and after > started) - usual


def _apply(file: Path) -> float:
    """Copy every tensor of the file into one that is there already."""
    with safe_open(file, framework="pt", device="cpu") as tensors:
        names = list(tensors.keys())
        parameters = {name: torch.zeros_like(tensors.get_tensor(name)) for name in names}
        started = time.perf_counter()
        for name in names:
            parameters[name].copy_(tensors.get_tensor(name))
        return time.perf_counter() - started
