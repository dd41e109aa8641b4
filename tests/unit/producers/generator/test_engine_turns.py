"""A generator's turns on a GPU of the trainer: who has it when, and in which order it is given and taken back."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from broker.client import Broker
from broker.flow.run_control import ControlState
from producers.engines.base import Engine, EngineSettings
from producers.engines.scripted import ScriptedEngine
from producers.generator import device_turns
from producers.generator.device_turns import EngineTurns, shares_gpus
from producers.generator.orders import OrderFollower
from producers.generator.weight_updates import WeightUpdater
from schemas.errors import ConfigError, InfraError
from schemas.messages import Sampling
from schemas.system.device_lock import VARIABLE, DeviceLock, SharedGpus, generator_lock, trainer_lock
from schemas.system.lifecycle import StopFlag


class SharedGpu:
    """One generator on a GPU that ``trainer`` wants while it holds its lock; ``own`` is another view of the GPU's lock.

    calls: of the engine, and the check of its weights. started: lets the turns begin.
    """

    def __init__(self, folder: Path) -> None:
        self.calls: list[str] = []
        self.last_probe_s = 0.0
        self.version = 7
        self.trainer, self.own = trainer_lock(folder), generator_lock(folder, "generator-0")
        self.engine = ScriptedEngine(
            EngineSettings("m", "float32", 64, 8, args={"max_length": 64, "min_length": 64, "token_s": 0.01})
        )
        for name in ("pause", "resume", "sleep", "wake"):
            self._note(name)
        self.orders = OrderFollower(cast(Broker, None), self.engine)
        self.turns = EngineTurns(str(folder), "generator-0", self.engine, self.orders, cast(WeightUpdater, self))

    def _note(self, name: str) -> None:
        real = getattr(self.engine, name)

        async def noted() -> None:
            self.calls.append(name)
            assert not self.own.is_free(shared=True), f"{name} without the GPU"
            await real()

        setattr(self.engine, name, noted)

    async def check_woken(self, stop: StopFlag) -> None:
        self.calls.append("check")
        assert not self.orders.is_open

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        stop = StopFlag()
        assert await self.turns.take(stop)
        await self.orders.engine_started()
        await self.orders.follow(None)
        running = asyncio.create_task(self.turns.run(stop))
        try:
            async with asyncio.timeout(30):
                yield
        finally:
            stop.set()
            await running
            self.turns.close()

    async def until_free(self, lock: DeviceLock, free: bool = True) -> None:
        while lock.is_free() is not free:  # noqa: ASYNC110 - another process decides, and can't wake us
            await asyncio.sleep(0.005)

    async def until_open(self, is_open: bool = True) -> None:
        while self.orders.is_open is not is_open:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.005)


@pytest.fixture
def gpu(tmp_path: Path) -> SharedGpu:
    return SharedGpu(tmp_path)


async def test_the_gpu_is_given_asleep_and_taken_back_checked(gpu: SharedGpu) -> None:
    async with gpu.running():
        assert gpu.turns.clock.figures()["device_held_s"] < 30
        for _ in range(2):
            assert gpu.trainer.try_hold()
            await gpu.until_free(gpu.own)
            assert gpu.orders.is_asleep
            assert "device_lent_s" in gpu.turns.clock.figures()
            gpu.trainer.release()
            await gpu.until_open()
            assert not gpu.own.is_free(shared=True)
    assert gpu.calls == ["pause", "sleep", "wake", "check", "resume"] * 2


async def test_samples_in_flight_are_handed_back_with_their_tokens(gpu: SharedGpu) -> None:
    async with gpu.running():
        sampling = asyncio.create_task(gpu.engine.generate([1, 2], Sampling(max_tokens=60), 2))
        while gpu.engine.growth() is None or not gpu.engine.growth():  # noqa: ASYNC110 - tokens have no event
            await asyncio.sleep(0)
        assert gpu.trainer.try_hold()
        completions = await sampling
        assert {completion.finish for completion in completions} == {"abort"}
        assert all(completion.tokens for completion in completions)
        later = asyncio.create_task(gpu.engine.generate([1, 2], Sampling(max_tokens=60)))
        await gpu.until_free(gpu.own)
        await asyncio.sleep(0.05)
        assert not later.done(), "a request of an episode that continues waits for the next turn"
        gpu.trainer.release()
        assert (await later)[0].finish == "length"


async def test_a_generator_that_starts_waits_for_the_trainer(gpu: SharedGpu) -> None:
    assert gpu.trainer.try_hold()
    stop = StopFlag()
    taking = asyncio.create_task(gpu.turns.take(stop))
    await asyncio.sleep(0.1)
    assert gpu.own.is_free()
    stop.set()
    assert not await taking
    gpu.trainer.release()
    assert await gpu.turns.take(StopFlag())
    assert not gpu.own.is_free()
    gpu.turns.close()


async def test_a_trainer_asking_while_the_lock_is_taken_wins(gpu: SharedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([True, False, False])
    real = DeviceLock.is_free

    def is_free(lock: DeviceLock, shared: bool = False) -> bool:
        return next(answers, True) if lock is gpu.turns._wanted else real(lock, shared)

    monkeypatch.setattr(DeviceLock, "is_free", is_free)
    assert not gpu.turns._try_take()
    assert gpu.own.is_free()


async def test_nothing_is_woken_during_a_pause_that_was_ordered(gpu: SharedGpu) -> None:
    async with gpu.running():
        assert gpu.trainer.try_hold()
        await gpu.until_free(gpu.own)
        await gpu.orders.follow(ControlState(pause="freeze", pause_id=1))
        gpu.trainer.release()
        await asyncio.sleep(0.1)
        assert gpu.own.is_free()
        await gpu.orders.follow(ControlState(pause_id=2))
        assert not gpu.orders.is_open, "the engine sleeps"
        await gpu.until_open()
    assert gpu.calls == ["pause", "sleep", "wake", "check", "resume"]


async def test_orders_that_change_during_a_hand_over_count_at_its_end(gpu: SharedGpu) -> None:
    checking, checked = asyncio.Event(), asyncio.Event()

    async def check_woken(stop: StopFlag) -> None:
        checking.set()
        await checked.wait()

    gpu.check_woken = check_woken  # type: ignore[method-assign]
    async with gpu.running():
        assert gpu.trainer.try_hold()
        await gpu.until_free(gpu.own)
        gpu.trainer.release()
        await checking.wait()
        await gpu.orders.follow(ControlState(pause="freeze", pause_id=1))
        checked.set()
        while gpu.orders.is_asleep:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        assert not gpu.orders.is_open
        await gpu.orders.follow(ControlState(pause_id=2))
        await gpu.until_open()
    assert gpu.calls == ["pause", "sleep", "wake", "resume"]


async def test_a_hand_over_takes_no_time_of_its_own(gpu: SharedGpu) -> None:
    async with gpu.running():
        started = time.monotonic()
        assert gpu.trainer.try_hold()
        await gpu.until_free(gpu.own)
        gpu.trainer.release()
        await gpu.until_open()
        assert time.monotonic() - started < 1.0
    parts = {name: gpu.turns.clock.figures()[f"hand_over:{name}"] for name in ("sleep", "wake", "load", "probe")}
    assert parts["probe"] == gpu.last_probe_s
    assert parts["sleep"] > 0


DRIVER = """#!/bin/sh
cd "{folder}"
case "$*" in
  *--query-gpu=index,uuid,memory.free*) echo "0, GPU-0, $((1000 - ($(cat * | paste -sd+ -))))" ;;
  *--query-compute-apps=pid,used_memory*) for pid in *; do echo "$pid, $(cat $pid)"; done ;;
esac
"""


@pytest.fixture
def memory(gpu: SharedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The memory of a GPU of 1,000 MiB: a file for each process. The engine has 600 MiB while it is awake."""
    folder, program = tmp_path / "memory", tmp_path / "bin" / "nvidia-smi"
    for each in (folder, program.parent):
        each.mkdir()
    program.write_text(DRIVER.format(folder=folder))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    sleep, wake, own = gpu.engine.sleep, gpu.engine.wake, folder / "7"
    own.write_text("600\n")

    async def sleep_and_free() -> None:
        await sleep()
        own.write_text("0\n")

    async def allocate_and_wake() -> None:
        own.write_text("600\n")
        assert sum(int(file.read_text()) for file in folder.iterdir()) <= 1000, "out of memory"
        await wake()

    gpu.engine.sleep = sleep_and_free  # type: ignore[method-assign]
    gpu.engine.wake = allocate_and_wake  # type: ignore[method-assign]
    return folder


async def test_an_engine_wakes_when_the_driver_says_that_its_memory_is_free(gpu: SharedGpu, memory: Path) -> None:
    async with gpu.running():
        assert gpu.trainer.try_hold()
        await gpu.until_free(gpu.own)
        (memory / "8").write_text("900\n")
        gpu.trainer.release()
        await gpu.until_free(gpu.own, free=False)
        for size in ("900", "500", "400"):
            assert "wake" not in gpu.calls[gpu.calls.index("sleep") :]
            (memory / "8").write_text(f"{size}\n")
            await asyncio.sleep(0.3)
        await gpu.until_open()


async def test_who_has_the_memory_that_an_engine_needs_is_said_in_one_line(
    gpu: SharedGpu, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_turns, "FREE_S", 0.3)
    stop = StopFlag()
    assert await gpu.turns.take(stop)
    await gpu.orders.engine_started()
    await gpu.orders.follow(None)
    running = asyncio.create_task(gpu.turns.run(stop))
    assert gpu.trainer.try_hold()
    await gpu.until_free(gpu.own)
    (memory / "8").write_text("900\n")
    gpu.trainer.release()
    with pytest.raises(InfraError, match=r"GPU 0 has 0\.1 GB free .*needs 0\.6 GB.* process 8 0\.9 GB"):
        await running
    assert "wake" not in gpu.calls
    gpu.turns.close()


def test_an_engine_that_cannot_sleep_is_refused_in_a_line(tmp_path: Path) -> None:
    engine = cast(Engine, object())
    with pytest.raises(ConfigError, match="generator-3 has GPUs of the trainer, and its engine lacks sleep and wake"):
        EngineTurns(str(tmp_path), "generator-3", engine, cast(OrderFollower, None), cast(WeightUpdater, None))


def test_only_generators_that_share_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, SharedGpus("/run/devices", ["generator-0", "generator-far-0"]).to_environment())
    names = ("generator-0", "generator-1", "generator-far-0")
    assert [shares_gpus(name) for name in names] == ["/run/devices", None, "/run/devices"]
    assert shares_gpus("mine") is None
    monkeypatch.delenv(VARIABLE)
    assert shares_gpus("generator-0") is None
