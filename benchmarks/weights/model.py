"""The two ends of ``tidemill bench weights``: a random model of a given size, and an engine that loads it.

``WeightsModel`` makes one real optimizer step. ``load_times`` measures what a load of new weights costs requests in
flight, beside the bare copy of these weights into a model.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors import safe_open
from transformers import Qwen2Config

from consumers.trainer.model.policy import Policy
from consumers.trainer.model.probe import reference_logprobs
from consumers.trainer.model.snapshot import Snapshot, Snapshots
from consumers.trainer.step.optimizers import build_optimizer
from deploy.offline.tiny_model import byte_tokenizer, random_model
from producers.engines.base import Completion, Engine, EngineSettings
from producers.engines.factory import make_engine
from schemas.config import OptimizerConfig
from schemas.errors import ConfigError
from schemas.messages import FileSource, Sampling

WIRE = "bfloat16"
PROBE = 32
"""Tokens of a probe, as trainer.publish.probe_tokens by default."""


@dataclass(frozen=True)
class ModelShape:
    """Build a decoder with this number of layers; its parameters are close to its name in SHAPES."""

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int


SHAPES = {
    "1M": ModelShape(128, 384, 4, 512),
    "50M": ModelShape(512, 1408, 15, 4096),
    "500M": ModelShape(1280, 3456, 24, 8192),
}


class WeightsModel:
    """A policy with float32 parameters, as a trainer holds them, and AdamW at a learning rate of 1e-6."""

    def __init__(self, name: str) -> None:
        shape = SHAPES.get(name)
        if shape is None:
            raise ConfigError(f"a model of {name} is not known here, give some of {', '.join(SHAPES)}")
        model = random_model(
            shape.vocabulary,
            0,
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            layers=shape.layers,
            heads=shape.hidden // 64,
            max_length=1024,
        )
        self.policy = Policy(model)
        self.parameters = sum(parameter.numel() for parameter in self.policy.parameters())
        self._snapshots = Snapshots(self.policy, WIRE)
        self._tokens = torch.randint(shape.vocabulary, (4, 128), generator=torch.Generator().manual_seed(0))

    def step(self) -> None:
        """Make one optimizer step on the cross-entropy of 4 × 128 random tokens."""
        optimizer = build_optimizer(self.policy, OptimizerConfig(lr=1e-6))
        self.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def backward(self) -> None:
        """Run forward and backward, the part of a step that reads the weights."""
        targets = self._tokens[:, 1:]
        scores = self.policy(self._tokens, targets, torch.ones_like(targets, dtype=torch.bool))
        (-scores.logprobs.mean()).backward()

    def take(self, path: Path) -> Snapshot:
        """Describe the weights to publish."""
        return self._snapshots.take(path)

    def probe(self) -> None:
        """Run the forward that computes the probe's reference."""
        reference_logprobs(self.policy, self._tokens[0, :PROBE].tolist())

    def write(self, path: Path) -> None:
        """Write the weights to publish."""
        self.take(path).fill()

    def save(self, folder: Path) -> Path:
        """Write a model folder from which an engine starts."""
        lm: Any = self.policy.causal_lm
        folder.mkdir(parents=True)
        config = Qwen2Config.from_dict(lm.config.to_dict() | {"dtype": WIRE})
        config.architectures = ["Qwen2ForCausalLM"]
        config.save_pretrained(folder)
        self.write(folder / "model.safetensors")
        byte_tokenizer([]).save_pretrained(folder)
        return folder


REQUESTS = 4
"""Requests in flight while weights are loaded."""
SAME_STEP_S = 0.0005
"""Seconds below which tokens belong to one step of the engine."""
TOKENS_DEADLINE_S = 300.0


async def load_times(name: str, model: Path, file: Path, rounds: int) -> tuple[float, float]:
    """Measure the seconds to copy the file into a model with simple code, and the pause of running requests."""
    settings = EngineSettings(model_path=str(model), dtype=WIRE, max_length=1024, max_samples=REQUESTS, report_every=1)
    engine: Engine = make_engine(name, settings, Path())
    await engine.start()
    try:
        pauses = [await _pause(engine, file, version) for version in range(1, rounds + 1)]
    finally:
        await engine.close()
    return min(_apply(file) for _ in range(rounds + 1)), median(pauses)


async def _pause(engine: Engine, file: Path, version: int) -> float:
    """Return the longest time between two tokens during a load, less the usual time."""
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
    """Copy every tensor of the file into an existing one."""
    with safe_open(file, framework="pt", device="cpu") as tensors:
        names = list(tensors.keys())
        parameters = {name: torch.zeros_like(tensors.get_tensor(name)) for name in names}
        started = time.perf_counter()
        for name in names:
            parameters[name].copy_(tensors.get_tensor(name))
        return time.perf_counter() - started
