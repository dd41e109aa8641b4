"""Samples in flight: what new weights, pauses and a requested end do to them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from broker.client import Broker
from broker.connection.keys import GENERATORS
from broker.queues.tasks import TaskQueue
from producers.workflows.base import RolloutContext
from producers.workflows.trajectory_builder import SampledCompletion, TrajectoryBuilder
from tests.support.producers.generator_service import (
    Engine,
    begin_run,
    make_config,
    make_engine,
    make_task,
    order_freeze,
    publish_version,
    read_published,
    running_generator,
    versions_in,
    wait_until,
)

BLOCK_MS = 4000


class TwoTurns:
    """Each sample takes two requests, one after the other."""

    async def run(self, rollout: RolloutContext) -> AsyncIterator[SampledCompletion]:
        for index in rollout.indices:
            trajectory = TrajectoryBuilder(index, rollout.tokenizer).prompt([5, 6])
            for _ in range(2):
                await rollout.generate(trajectory)
            yield trajectory.finish()


async def test_with_drain_every_sample_is_of_one_version(model: Path, broker: Broker, tmp_path: Path) -> None:
    training = begin_run(broker, tmp_path, *(make_task(task_id, n=1) for task_id in range(8)))
    workflow = {"name": f"{__name__}:TwoTurns"}
    config = make_config(model, tmp_path, update="drain", max_samples=4, workflow=workflow)
    engine = make_engine(config, min_length=60, max_length=120)

    async with running_generator(config, broker, engine):
        await engine.generating.wait()
        publish_version(broker, training, tmp_path, 2)
        found = await read_published(broker, 8)
        assert versions_in(found) == {1, 2}
        assert all(len({span.version for span in item.spans}) == 1 for item in found)


@pytest.mark.parametrize("update", ["keep", "recompute", "drain"])
async def test_a_freeze_stops_generation_in_an_update(model: Path, broker: Broker, tmp_path: Path, update: str) -> None:
    training = begin_run(broker, tmp_path, make_task(0, n=4))
    config = make_config(model, tmp_path, update=update)
    # They take a minute, which is longer than anything here is waited for.
    engine = make_engine(config, min_length=300, max_length=300, token_s=0.2)

    async with running_generator(config, broker, engine):
        await engine.generating.wait()
        publish_version(broker, training, tmp_path, 2)
        await wait_until(order_freeze(broker))
        rounds = engine._rounds
        assert rounds < 300, "it did not wait for samples to be finished"
        engine.hurry()
        await asyncio.sleep(0.3)
        assert engine._rounds == rounds
        broker.run_control.pause("none", "test")
        found = await read_published(broker, 4)
        await wait_until(lambda: engine.version == 2)
        assert versions_in(found) == {1} if update == "drain" else versions_in(found) == {1, 2}


async def test_a_drain_for_weights_hands_back_when_asked_to_end(model: Path, broker: Broker, tmp_path: Path) -> None:
    training = begin_run(broker, tmp_path, make_task(0))
    config = make_config(model, tmp_path, update="drain")
    engine = make_engine(config, min_length=900, max_length=900, token_s=0.05)

    async with running_generator(config, broker, engine):
        await engine.generating.wait()
        publish_version(broker, training, tmp_path, 2)
        await wait_until(lambda: any((tmp_path / "run" / "cache" / "g").glob("*")))
    assert engine.loaded == [1]
    (delivery,) = broker.task_queue("reader").read(1, 10)
    assert all(len(part.tokens) for part in delivery.message.partials)


async def test_samples_end_though_a_read_is_still_waiting(
    model: Path, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_run(broker, tmp_path, make_task(0))
    order: list[str] = []
    read, abort = TaskQueue.read, Engine.abort_all

    def slow(self: TaskQueue, count: int, **settings: Any) -> Any:
        order.append("reads")
        found = read(self, count, BLOCK_MS, **settings)
        order.append("has read")
        return found

    async def noted(self: Engine) -> None:
        order.append("aborts")
        await abort(self)

    monkeypatch.setattr(TaskQueue, "read", slow)
    monkeypatch.setattr(Engine, "abort_all", noted)
    config = make_config(model, tmp_path)
    engine = make_engine(config, min_length=900, max_length=900, token_s=0.02)

    async with running_generator(config, broker, engine):
        await engine.generating.wait()
        async with asyncio.timeout(30):
            while order != ["reads", "has read", "reads"]:  # noqa: ASYNC110 - noted in a thread
                await asyncio.sleep(0.01)
    assert order[:4] == ["reads", "has read", "reads", "aborts"]
    monkeypatch.setattr(TaskQueue, "read", read)
    (delivery,) = broker.task_queue("reader").read(1, 10)
    assert all(len(part.tokens) for part in delivery.message.partials)


async def test_a_task_that_waits_for_newer_weights_is_handed_back(model: Path, broker: Broker, tmp_path: Path) -> None:
    begin_run(broker, tmp_path)
    broker.connection.client.hset(
        broker.connection.keys.ctl, "version", 2
    )  # the trainer has made it, but not published it yet
    broker.ledger.admit(make_task(0))
    engine = make_engine(make_config(model, tmp_path))

    async with running_generator(make_config(model, tmp_path), broker, engine):
        await wait_until(lambda: broker.connection.client.xpending(broker.connection.keys.tasks, GENERATORS)["pending"])
    assert not engine.generating.is_set()
    (delivery,) = broker.task_queue("reader").read(1, 10)
    assert (delivery.message.task_id, delivery.version) == (0, 2)


async def test_a_task_that_ending_generators_return_is_kept(model: Path, broker: Broker, tmp_path: Path) -> None:
    begin_run(broker, tmp_path, make_task(0))
    config = make_config(model, tmp_path)
    config.broker.max_deliveries = 1
    for _ in range(3):
        engine = make_engine(config, token_s=0.3)
        async with running_generator(config, broker, engine):
            await wait_until(lambda engine=engine: engine.growth() is not None)
    (delivery,) = broker.task_queue("reader").read(1, 10)
    assert (delivery.message.task_id, delivery.fruitless) == (0, 0)
    assert [len(part.tokens) for part in delivery.message.partials] == [0, 0]
    assert broker.ledger.read_state().dead_letters == 0
