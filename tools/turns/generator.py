"""A generator of the walk: the product's turns, orders and weight updates around an engine that needs imitated GPUs."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import structlog

from broker.client import Broker
from broker.flow.run_control import ControlState
from producers.engines.base import EngineSettings, PromptImage
from producers.engines.scripted import ScriptedEngine
from producers.generator.device_turns import EngineTurns
from producers.generator.orders import OrderFollower
from producers.generator.weight_updates import WeightUpdater
from schemas.codec import Array
from schemas.config import parse_config
from schemas.errors import InfraError
from schemas.messages import FileSource, Manifest, Payload, Probe, Sampling, WeightSource
from schemas.system.device_lock import VARIABLE, SharedGpus
from schemas.system.lifecycle import StopFlag
from tools.turns.gpu import ImitatedGpus, WalkFiles
from tools.turns.planted import begin

log = structlog.get_logger()

TOKENS = (1, 2, 3)
SPOILT = 0.05
"""Share of sleeps that spoil the weights, as deep sleeps of vLLM have done."""
FREEZES = 0.1
"""Orders to pause a second."""


@dataclass(frozen=True)
class GeneratorOfWalk:
    """What a generator is started with. shares: whether its GPUs are the trainer's. plant: name of a planted fault."""

    folder: Path
    number: int
    gpus: Sequence[int]
    shared: SharedGpus
    seed: int
    plant: str | None


def scores(content: float) -> np.ndarray[Any, Any]:
    """Return the log-probabilities of the probe's tokens with weights of this content."""
    return np.full(len(TOKENS) - 1, -(content % 97) / 10, dtype=np.float32)


class ImitatedEngine(ScriptedEngine):
    """Needs its memory for whatever it does. Weights are a number, that of their version unless they are spoilt."""

    def __init__(self, given: GeneratorOfWalk, files: WalkFiles) -> None:
        args = {"min_length": 8, "max_length": 40, "token_s": 0.002}
        super().__init__(EngineSettings("none", "float32", 1000, 8, seed=given.number, args=args))
        self.orders: OrderFollower | None = None
        self._files, self._name = files, f"generator-{given.number}"
        self._gpus = ImitatedGpus(files, self._name, given.gpus)
        self._random = random.Random(given.seed)
        self._content, self._needed = 0.0, 0
        self._probed = self._told = False

    async def start(self) -> None:
        self._gpus.take()
        await asyncio.sleep(self._random.uniform(0, 0.05))

    async def sleep(self) -> None:
        await super().sleep()
        if self._random.random() < SPOILT:
            self._content += 0.5
        await asyncio.sleep(self._random.uniform(0, 0.01))
        self._gpus.free()

    async def wake(self) -> None:
        self._probed = self._told = False
        self._needed = self._files.published()
        self._gpus.take()
        await asyncio.sleep(self._random.uniform(0, 0.01))
        await super().wake()

    async def close(self) -> None:
        await super().close()
        self._gpus.free()

    async def load(self, source: WeightSource, version: int) -> None:
        self._gpus.need("loads weights")
        await asyncio.sleep(self._random.uniform(0, 0.005))
        self._gpus.need("loads weights")
        await super().load(source, version)
        self._content = float(version)

    async def logprobs(self, token_ids: Sequence[int], images: Sequence[PromptImage] = ()) -> Any:
        self._gpus.need("probes")
        self._probed = True
        return scores(self._content)

    def _step(self, samples: Any, progress: Any) -> None:
        self._gpus.need("samples a token")
        assert self.orders is not None
        if not self._probed:
            self._files.violate(f"{self._name} samples a token before its probe")
        if self._content != self.version:
            self._files.violate(f"{self._name} samples a token with weights that its sleep has spoilt")
        if self.version < self._needed:
            self._files.violate(f"{self._name} woke, and samples with version {self.version}, not {self._needed}")
        if self.orders.is_frozen or self.orders.is_asleep:
            self._files.violate(f"{self._name} samples a token while it is paused")
        if not self._told:
            self._told = True
            (self._files.progress / self._name).touch()
        super()._step(samples, progress)


class StoredWeights:
    """Stands for the broker: the newest version, whose number is in a file."""

    def __init__(self, files: WalkFiles) -> None:
        self._files = files
        self.weights = self.events = self

    def newest(self) -> Manifest:
        version = self._files.published()
        probe = Probe(tokens=Array.of(TOKENS, "i4"), logprobs=Array.of(scores(version), "f4"))
        return Manifest(
            version=version, step=version, leader_term=1, state=Payload("file:none", 1, []), tensors=[], probe=probe
        )

    def wait_newer(self, version: int) -> Manifest | None:
        found = self.newest()
        return found if found.version > version else None

    def published(self) -> list[Manifest]:
        return [self.newest()]

    def task_queue(self, name: str) -> None:
        return None

    def note_verdict(self, version: int, name: str, reason: str) -> None:
        return None

    def withdraw(self) -> None:
        return None

    def emit(self, event: object) -> None:
        return None


def run_generator(given: GeneratorOfWalk) -> None:
    """Be a generator until the process is killed or its weights fail their probe; another end is a violation."""
    begin(given.folder / f"generator-{given.number}.log", given.plant)
    os.environ[VARIABLE] = given.shared.to_environment()
    try:
        asyncio.run(_serve(given))
    except* InfraError as failed:
        log.warning("ends", error=str(failed.exceptions[0]))
    except* BaseException as failed:  # noqa: BLE001 - whatever it is, it breaks a promise
        WalkFiles(given.folder).violate(f"generator-{given.number} ends: {failed.exceptions[0]!r}")


async def _serve(given: GeneratorOfWalk) -> None:
    files, stop = WalkFiles(given.folder), StopFlag()
    name = f"generator-{given.number}"
    engine, broker = ImitatedEngine(given, files), cast(Broker, StoredWeights(files))
    orders = engine.orders = OrderFollower(broker, engine)
    config = parse_config(
        {
            "run": {"folder": str(given.folder)},
            "model": {"path": "none", "dtype": "float32", "max_length": 1000},
            "train": {"name": "arithmetic"},
            "reward": {"terms": [{"name": "exact"}]},
            "generator": {"engine": "scripted", "probe_tolerance": 1e-3},
        }
    )
    updates = WeightUpdater(config, name, broker, engine, given.folder / "cache" / name, orders)
    updates._source = lambda manifest: FileSource(files.newest)  # type: ignore[method-assign]
    turns = EngineTurns.of(name, engine, orders, updates)
    # What producers/generator/service.py does, without samples that anyone keeps.
    async with asyncio.TaskGroup() as group:
        if turns is not None:
            await turns.take(stop)
        await engine.start()
        await orders.engine_started()
        await orders.follow(ControlState())
        group.create_task(updates.run(stop))
        if turns is not None:
            group.create_task(turns.run(stop))
        group.create_task(_freeze(orders, random.Random(given.seed)))
        for _ in range(2):
            group.create_task(_ask(engine, orders, updates))


async def _ask(engine: ImitatedEngine, orders: OrderFollower, updates: WeightUpdater) -> None:
    """Have samples generated as the product's tasks do."""
    while await orders.wait_open():
        async with updates.using(0, evaluating=False) as ready:
            if ready:
                await engine.generate([1, 2], Sampling(max_tokens=60), 2)
        await asyncio.sleep(0)


async def _freeze(orders: OrderFollower, rng: random.Random) -> None:
    """Order a pause now and then."""
    number = 0
    while True:
        await asyncio.sleep(rng.expovariate(FREEZES))
        number += 2
        await orders.follow(ControlState(pause="freeze", pause_id=number))
        await asyncio.sleep(rng.uniform(0, 0.3))
        await orders.follow(ControlState(pause_id=number + 1))
