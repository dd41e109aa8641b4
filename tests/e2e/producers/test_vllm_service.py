"""The generator service with real vLLM: spoilt weights, pauses, a small cache, and a dying engine core."""

import asyncio
import importlib.util
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from broker.client import Broker
from broker.flow.trainer_session import TrainerSession
from broker.weights.local_copy import LocalWeights
from producers.engines.vllm import engine as vllm_module
from producers.engines.vllm.engine import VllmEngine
from schemas.config import TidemillConfig
from schemas.errors import InfraError
from schemas.messages import Manifest, Trajectory
from tests.support.broker.trainer_sessions import take_over
from tests.support.configurations import minimal_config
from tests.support.producers.generator_service import (
    make_task,
    order_freeze,
    publish_version,
    read_published,
    run_generator_while,
    versions_in,
    wait_until,
)
from tests.support.producers.vllm_checks import Run, find_engine_cores, is_alive, reference_logprobs

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

PROBE = [5, 90, 17, 200, 33, 8, 150, 61]
LONG = 400  # tokens


class Lent:
    """The engine as one service has it that neither starts nor closes it."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def start(self) -> None:
        """It runs."""

    async def close(self) -> None:
        """Other generators resume it."""


class World:
    """A run with one generator, in which the test is everything else."""

    def __init__(self, broker: Broker, engine: VllmEngine, folders: dict[int, Path], folder: Path) -> None:
        self.broker, self.engine, self.folders, self.folder = broker, engine, folders, folder
        self.training: TrainerSession = take_over(broker, staleness=100)

    def config(self, **generator: Any) -> TidemillConfig:
        return minimal_config(
            run={"name": "g", "folder": str(self.folder / "run")},
            model={"path": str(self.folders[0]), "dtype": "float32", "max_length": 512},
            sampling={"n": 4, "max_tokens": LONG},
            generator={"engine": "vllm", "max_samples": 64, **generator},
            trainer={"publish": {"transport": "redis"}},
        )

    def admit(self, count: int, max_tokens: int = LONG) -> None:
        self.broker.ledger.admit_all([make_task(task_id, 4, max_tokens) for task_id in range(count)])

    def publish(self, version: int, seed: int) -> None:
        content = (self.folders[seed] / "model.safetensors").read_bytes()
        probe = (PROBE, reference_logprobs(self.folders[seed], PROBE))
        publish_version(self.broker, self.training, self.folder, version, content, probe)

    def sampled(self) -> int:
        """Tokens of what is in flight; of growth() not seen in a pause."""
        states = list(self.engine.llm.output_processor.request_states.values())
        return sum(state.detokenizer.num_output_tokens() for state in states if state.detokenizer)

    async def under_way(self) -> None:
        await wait_until(lambda: self.sampled() > 100)


@pytest.fixture
def world(broker: Broker, engine: VllmEngine, folders: dict[int, Path], tmp_path: Path) -> World:
    return World(broker, engine, folders, tmp_path)


def assert_sampled_by(folder: Path, version: int, found: list[Trajectory]) -> None:
    """Every token of this version has the log-probability that the folder's weights give it."""
    spans = [(item, span) for item in found for span in item.spans if span.version == version]
    assert spans
    for item, span in spans:
        expected = reference_logprobs(folder, item.tokens.numpy().tolist())[span.start - 1 : span.end - 1]
        np.testing.assert_allclose(item.logprobs.numpy()[span.start : span.end], expected, atol=1e-3)


def spoil(file: Path) -> None:
    """Change one tensor of many."""
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("1.mlp.down_proj.weight"))
    save_file({**tensors, name: tensors[name] * 1.5}, file, {"format": "pt"})


def test_weights_spoilt_after_a_check_are_taken_back(world: World, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    broker, engine, fetch = world.broker, world.engine, LocalWeights.fetch

    def spoilt(self: LocalWeights, manifest: Manifest) -> Path:
        path = fetch(self, manifest)
        if manifest.version == 2:
            spoil(path)
        return path

    monkeypatch.setattr(LocalWeights, "fetch", spoilt)
    world.publish(1, seed=0)
    world.admit(3)

    async def scene() -> None:
        await world.under_way()
        world.publish(2, seed=7)
        await wait_until(lambda: [stored.event for stored in broker.events.newest(5)])
        await wait_until(lambda: engine.version == 1)
        world.publish(3, seed=8)
        found = await read_published(broker, 12)
        assert versions_in(found) == {1, 3}
        assert_sampled_by(world.folders[0], 1, found)

    run(run_generator_while(world.config(), broker, Lent(engine), scene))
    (event,) = [stored.event for stored in broker.events.newest(5)]
    assert event.name == "weights_rejected"
    assert "version 2 fails its probe" in event.text


@pytest.mark.parametrize("update", ["keep", "recompute", "drain"])
def test_an_acknowledged_freeze_is_final(world: World, run: Run, monkeypatch: pytest.MonkeyPatch, update: str) -> None:
    broker, engine = world.broker, world.engine
    monkeypatch.setattr(engine, "_settings", replace(engine._settings, recompute=update == "recompute"))
    world.publish(1, seed=0)
    world.admit(4)

    async def scene() -> None:
        await world.under_way()
        world.publish(2, seed=7)
        await wait_until(order_freeze(broker))
        before = world.sampled()
        assert 0 < before < 16 * LONG
        await asyncio.sleep(0.3)
        assert world.sampled() == before
        broker.run_control.pause("none", "test")
        found = await read_published(broker, 16)
        await wait_until(lambda: engine.version == 2)
        assert versions_in(found) == ({1} if update == "drain" else {1, 2})
        assert_sampled_by(world.folders[0], 1, found)
        if update == "recompute":
            assert_sampled_by(world.folders[7], 2, found)

    run(run_generator_while(world.config(update=update), broker, Lent(engine), scene))


def test_a_small_cache_takes_what_runs_unpreempted(world: World, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    preempted: list[int] = []
    final, params, tokens = vllm_module.final_output, vllm_module.sampling_params, 200

    async def watched(*args: Any) -> Any:
        output = await final(*args)
        preempted.append(output.metrics.num_preemptions)
        return output

    def endless(*args: Any) -> Any:
        made = params(*args)
        made.ignore_eos = True  # every sample is of the same length, two blocks with its prompt
        return made

    monkeypatch.setattr(vllm_module, "final_output", watched)
    monkeypatch.setattr(vllm_module, "sampling_params", endless)
    sampling = make_task(0, max_tokens=tokens).sampling
    run(world.engine.generate(PROBE, sampling, n=64))
    assert sum(preempted), "all at once is too much"
    preempted.clear()
    world.publish(1, seed=0)
    world.admit(24, max_tokens=tokens)

    async def scene() -> None:
        assert len(await read_published(world.broker, 96)) == 96

    run(run_generator_while(world.config(), world.broker, Lent(world.engine), scene))
    assert len(preempted) >= 96
    assert not sum(preempted)


def test_a_dead_engine_core_ends_the_service_and_its_tasks_go_to_others(world: World, run: Run) -> None:
    """Last of those that share the engine: it is gone after this."""
    world.publish(1, seed=0)
    world.admit(2)
    cores = find_engine_cores(os.getpid())
    assert cores

    async def scene() -> None:
        await world.under_way()
        for pid in cores:
            os.kill(pid, signal.SIGKILL)
        await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as caught:
        run(run_generator_while(world.config(), world.broker, Lent(world.engine), scene))
    assert caught.group_contains(InfraError, match="engine core")
    with pytest.raises(InfraError):
        run(world.engine.generate(PROBE, make_task(0).sampling))
    assert not any(is_alive(pid) for pid in cores)
    deliveries = world.broker.task_queue("other").claim_stale(0.0, 10)
    assert {item.message.task_id for item in deliveries} == {0, 1}
