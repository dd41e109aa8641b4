"""One generator service on a GPU that a trainer takes and gives: no sample is lost, none is sampled unchecked."""

import asyncio
from pathlib import Path

import pytest

from broker.client import Broker
from producers.engines.base import EngineSettings
from producers.generator.weight_updates import WeightUpdater
from schemas.errors import InfraError
from schemas.messages import Manifest, WeightSource
from schemas.messages.telemetry import ASLEEP
from schemas.system.device_lock import VARIABLE, DeviceLock, SharedGpus, generator_lock, trainer_lock
from tests.support.producers.generator_service import (
    Engine,
    begin_run,
    make_config,
    make_engine,
    make_task,
    publish_version,
    read_published,
    running_generator,
    wait_until,
)

NAME = "generator-0"


class SharedTrainer:
    """The trainer's locks on one GPU, in the same process."""

    def __init__(self, folder: Path) -> None:
        self.wanted, self.gpu = trainer_lock(folder), generator_lock(folder, "generator-0")

    async def hold(self) -> None:
        assert await until(self.wanted)
        assert await until(self.gpu, shared=True)

    def give(self) -> None:
        self.gpu.release()
        self.wanted.release()


async def until(lock: DeviceLock, shared: bool = False) -> bool:
    async with asyncio.timeout(30):
        while not lock.try_hold(shared):  # noqa: ASYNC110 - the kernel does not say
            await asyncio.sleep(0.005)
        return True


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SharedTrainer:
    folder = tmp_path / "run" / "devices"
    monkeypatch.setenv(VARIABLE, SharedGpus(str(folder), ["generator-0"]).to_environment())
    return SharedTrainer(folder)


async def test_samples_go_on_after_each_turn_with_the_newest_weights(
    model: Path, broker: Broker, tmp_path: Path, trainer: SharedTrainer
) -> None:
    training = begin_run(broker, tmp_path, *(make_task(task_id) for task_id in range(8)))
    config = make_config(model, tmp_path)
    engine = make_engine(config, min_length=60, max_length=120, token_s=0.002)
    versions: list[int] = []
    async with running_generator(config, broker, engine, NAME):
        for turn in range(6):
            await engine.generating.wait()
            versions.append(engine.version)
            await trainer.hold()
            engine.generating.clear()
            rounds = engine._rounds
            publish_version(broker, training, tmp_path, 2 + turn // 2)
            await asyncio.sleep(0.05)
            assert engine._rounds == rounds, "it sampled while the trainer had the GPU"
            trainer.give()
        found = await read_published(broker, 16)
    assert {(item.task_id, item.sample) for item in found} == {(task, sample) for task in range(8) for sample in (0, 1)}
    assert len(found) == 16
    assert all(item.loss_mask.data.count(1) >= 60 for item in found)
    assert versions == [1, 2, 2, 3, 3, 4]
    assert any(len({span.version for span in item.spans}) > 1 for item in found), (
        "samples were continued in a later turn"
    )
    assert trainer.gpu.is_free()


async def test_weights_that_cannot_be_fetched_keep_no_gpu_from_their_trainer(
    model: Path, broker: Broker, tmp_path: Path, trainer: SharedTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer that would serve them ended, and its successor waits for the GPU."""
    real = WeightUpdater._source

    def source(updates: WeightUpdater, manifest: Manifest) -> WeightSource:
        if manifest.version == 2:
            raise InfraError("no peer has it")
        return real(updates, manifest)

    monkeypatch.setattr(WeightUpdater, "_source", source)
    training = begin_run(broker, tmp_path, *(make_task(task_id) for task_id in range(8)))
    config = make_config(model, tmp_path)
    engine = make_engine(config, min_length=60, max_length=120, token_s=0.002)
    async with running_generator(config, broker, engine, NAME):
        await engine.generating.wait()
        await trainer.hold()
        engine.generating.clear()
        publish_version(broker, training, tmp_path, 2)
        trainer.give()
        await engine.generating.wait()
        assert engine.version == 1
        await trainer.hold()
        trainer.give()
        publish_version(broker, training, tmp_path, 3)
        await wait_until(lambda: engine.version == 3)


async def test_samples_that_turns_cut_short_again_and_again_do_not_fail(
    model: Path, broker: Broker, tmp_path: Path, trainer: SharedTrainer
) -> None:
    """Their generator returns them without a new token, but it is not the fault of their workflow."""
    begin_run(broker, tmp_path, make_task(0))
    config = make_config(model, tmp_path)
    config.broker.max_deliveries = 2
    engine = make_engine(config, min_length=20, max_length=20, token_s=0.3)
    async with running_generator(config, broker, engine, NAME):
        for turn in range(5):
            await wait_until(lambda turn=turn: engine._requests > turn)
            await trainer.hold()
            trainer.give()
        engine.hurry()
        await trainer.hold()
        trainer.give()
        assert len(await read_published(broker, 2)) == 2


async def test_who_waits_for_the_gpu_loads_no_engine_and_says_what_it_does(
    model: Path, broker: Broker, tmp_path: Path, trainer: SharedTrainer
) -> None:
    started = asyncio.Event()

    class Starting(Engine):
        async def start(self) -> None:
            started.set()

    def beat() -> tuple[str, set[str]]:
        (found,) = broker.heartbeats.list() or [None]
        return (
            ("", set()) if found is None else (found.state, found.figures.keys() & {"device_held_s", "device_lent_s"})
        )

    begin_run(broker, tmp_path, make_task(0))
    config = make_config(model, tmp_path)
    settings = EngineSettings("none", "float32", 2000, 8, args={"token_s": 0.001, "min_length": 500, "max_length": 500})
    await trainer.hold()
    async with running_generator(config, broker, Starting(settings), NAME):
        await wait_until(lambda: beat() == ("loading", {"device_lent_s"}))
        assert not started.is_set()
        trainer.give()
        await wait_until(lambda: beat() == ("running", {"device_held_s"}))
        await trainer.hold()
        await wait_until(lambda: beat() == (ASLEEP, {"device_lent_s"}))
        trainer.give()
        assert len(await read_published(broker, 2)) == 2
