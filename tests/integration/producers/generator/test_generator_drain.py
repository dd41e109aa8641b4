"""What new weights and pauses do to samples in flight, in every combination."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.client import Broker
from producers.workflows.base import RolloutContext
from producers.workflows.trajectory_builder import SampledCompletion, TrajectoryBuilder
from tests.support.producers.generator_service import (
    begin_run,
    make_config,
    make_engine,
    make_task,
    order_freeze,
    publish_version,
    read_published,
    run_generator_during,
    versions_in,
    wait_until,
)

pytestmark = pytest.mark.integration


class TwoTurns:
    """Each sample takes two requests, one after the other."""

    async def run(self, rollout: RolloutContext) -> AsyncIterator[SampledCompletion]:
        for index in rollout.indices:
            trajectory = TrajectoryBuilder(index, rollout.tokenizer).prompt([5, 6])
            for _ in range(2):
                await rollout.generate(trajectory)
            yield trajectory.finish()


def test_with_drain_every_sample_is_of_one_version_however_many_requests_it_takes(
    model: Path, broker: Broker, tmp_path: Path
) -> None:
    training = begin_run(broker, tmp_path, *(make_task(task_id, n=1) for task_id in range(8)))
    workflow = {"name": f"{__name__}:TwoTurns"}
    config = make_config(model, tmp_path, update="drain", max_samples=4, workflow=workflow)
    engine = make_engine(config, min_length=60, max_length=120)

    async def scene() -> None:
        await engine.generating.wait()
        publish_version(broker, training, tmp_path, 2)
        found = await read_published(broker, 8)
        assert versions_in(found) == {1, 2}
        assert all(len({span.version for span in item.spans}) == 1 for item in found)

    run_generator_during(config, broker, engine, scene)


@pytest.mark.parametrize("update", ["keep", "recompute", "drain"])
def test_a_freeze_stops_generation_though_new_weights_are_on_their_way(
    model: Path, broker: Broker, tmp_path: Path, update: str
) -> None:
    training = begin_run(broker, tmp_path, make_task(0, n=4))
    config = make_config(model, tmp_path, update=update)
    # They take a minute, which is longer than anything here is waited for.
    engine = make_engine(config, min_length=300, max_length=300, token_s=0.2)

    async def scene() -> None:
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

    run_generator_during(config, broker, engine, scene)


def test_who_drains_for_new_weights_hands_back_at_once_when_asked_to_end(
    model: Path, broker: Broker, tmp_path: Path
) -> None:
    training = begin_run(broker, tmp_path, make_task(0))
    config = make_config(model, tmp_path, update="drain")
    engine = make_engine(config, min_length=900, max_length=900, token_s=0.05)

    async def scene() -> None:
        await engine.generating.wait()
        publish_version(broker, training, tmp_path, 2)
        await wait_until(lambda: any((tmp_path / "run" / "cache" / "g").glob("*")))

    run_generator_during(config, broker, engine, scene)
    assert engine.loaded == [1]
    (delivery,) = broker.task_queue("reader").read(1, 10)
    assert all(len(part.tokens) for part in delivery.message.partials)
