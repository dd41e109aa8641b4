"""Weights that can't be fetched: the generator keeps what it has, says so, and tries again."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from broker.client import Broker
from broker.flow.trainer_session import TrainerSession
from producers.engines.base import Engine
from producers.generator import weight_updates as updates_module
from producers.generator.orders import OrderFollower
from producers.generator.weight_updates import WeightUpdater
from schemas.codec import decode
from schemas.config import TidemillConfig, parse_config
from schemas.digests import base_digest
from schemas.errors import InfraError
from schemas.messages import Adapter, Event, Manifest, WeightSource
from schemas.system.lifecycle import StopFlag
from tests.support.broker.one_group import publish_weights
from tests.support.broker.trainer_sessions import take_over
from tests.support.configurations import minimal_config
from tests.support.models.tiny_model import make_tiny_model
from tests.support.producers.generator_service import wait_until


class Loads:
    """An engine that only notes which versions it was given."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    async def load(self, source: WeightSource, version: int) -> None:
        assert source.path.is_file()
        self.versions.append(version)


@pytest.fixture
def config(tmp_path: Path) -> TidemillConfig:
    return minimal_config(
        run={"name": "updates", "folder": str(tmp_path / "run")},
        model={"path": str(tmp_path), "dtype": "float32", "max_length": 64},
        sampling={"n": 2, "max_tokens": 16},
    )


@asynccontextmanager
async def updating(
    config: TidemillConfig, broker: Broker, folder: Path, adapter: Adapter | None = None
) -> AsyncIterator[tuple[WeightUpdater, Loads, TrainerSession]]:
    """The updates of one generator, which starts with version 1 in use; the broker's trainer is ours."""
    training, engine, stop = take_over(broker), Loads(), StopFlag()
    publish_weights(broker, training.leader_term, 1, folder, adapter=adapter)
    pause = OrderFollower(broker, cast(Engine, engine))
    updates = WeightUpdater(config, "g", broker, cast(Engine, engine), folder / "cache", pause)
    await pause.follow(None)
    following = asyncio.create_task(updates.run(stop))
    try:
        async with asyncio.timeout(30):
            assert await updates.wait_ready(1)
            yield updates, engine, training
    finally:
        stop.set()
        await following


async def alarm(broker: Broker) -> str:
    """The text of the first event; the server wakes us."""
    connection = broker.connection
    ((_, entries),) = await asyncio.to_thread(connection.client.xread, {connection.keys.events: "0"}, 1, 9000)
    return decode(entries[0][1][b"b"], Event).text


def damage(broker: Broker, how: str) -> Callable[[], Any]:
    """Spoil version 2 in the broker; returns what puts it right."""
    client, key = broker.connection.client, broker.connection.keys.chunks
    chunk = client.hget(key, "2:0")
    if how == "missing":
        client.hdel(key, "2:0")
    else:
        client.hset(key, "2:0", b"other bytes")
    return lambda: client.hset(key, "2:0", chunk)


@pytest.mark.parametrize("how", ["missing", "damaged"])
async def test_a_version_put_right_is_loaded(config: TidemillConfig, broker: Broker, tmp_path: Path, how: str) -> None:
    async with updating(config, broker, tmp_path) as (updates, engine, training):
        repair = publish_damaged(broker, training, tmp_path, how)
        assert "version 2 cannot be fetched" in await alarm(broker)
        assert updates.version == 1
        assert await updates.wait_ready(1), "the old version serves on"
        repair()
        assert await updates.wait_ready(2)
        assert engine.versions == [1, 2]


def publish_damaged(broker: Broker, training: TrainerSession, folder: Path, how: str) -> Callable[[], Any]:
    """Publish a version 2 that is corrupted before a generator can see it."""
    real = broker.connection.run_script
    repairs: list[Callable[[], Any]] = []

    def script(name: str, *args: Any, **options: Any) -> Any:
        if name == "add_version":
            repairs.append(damage(broker, how))
        return real(name, *args, **options)

    broker.connection.run_script = script  # type: ignore[method-assign]
    try:
        publish_weights(broker, training.leader_term, 2, folder, keep=2)
    finally:
        broker.connection.run_script = real  # type: ignore[method-assign]
    return repairs[0]


async def test_generators_fetch_a_version_again_at_different_moments(
    config: TidemillConfig, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[float, float]] = []

    def draw(least: float, most: float) -> float:
        asked.append((least, most))
        return 0.0

    monkeypatch.setattr("producers.generator.weight_updates.random.uniform", draw)
    async with updating(config, broker, tmp_path) as (updates, _, training):
        repair = publish_damaged(broker, training, tmp_path, "missing")
        await wait_until(lambda: len(asked) > 6)
        repair()
        assert await updates.wait_ready(2)
    assert asked[:6] == [(0.25, 0.5), (0.5, 1.0), (1.0, 2.0), (2.0, 4.0), (4.0, 8.0), (5.0, 10.0)]


async def test_a_newer_version_replaces_an_unfetchable(config: TidemillConfig, broker: Broker, tmp_path: Path) -> None:
    async with updating(config, broker, tmp_path) as (updates, engine, training):
        publish_damaged(broker, training, tmp_path, "missing")
        await alarm(broker)
        publish_weights(broker, training.leader_term, 3, tmp_path)
        assert await updates.wait_ready(3)
        assert engine.versions == [1, 3]


async def test_a_generator_waits_for_a_full_disk(config: TidemillConfig, broker: Broker, tmp_path: Path) -> None:
    async with updating(config, broker, tmp_path) as (updates, _, training):
        folder = tmp_path / "cache"
        folder.rmdir()
        folder.write_text("in the way of the folder")
        publish_weights(broker, training.leader_term, 2, tmp_path)
        assert "cannot be copied" in await alarm(broker)
        folder.unlink()
        assert await updates.wait_ready(2)


async def test_the_process_ends_when_a_version_stays_out_of_reach(
    config: TidemillConfig, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updates_module, "FETCH_DEADLINE_S", 0.0)

    async def lose_a_version() -> None:
        async with updating(config, broker, tmp_path) as (updates, _, training):
            publish_damaged(broker, training, tmp_path, "missing")
            assert not await updates.wait_ready(2), "no task waits for it any more"

    with pytest.raises(InfraError, match="gone from the broker"):
        await lose_a_version()


def adapter_of(model: Path, rank: int = 16, alpha: float = 32.0) -> Adapter:
    return Adapter(rank=rank, alpha=alpha, targets=["q_proj"], base=base_digest(model))


def with_lora(config: TidemillConfig, model: Path) -> TidemillConfig:
    return parse_config(
        {
            **config.model_dump(exclude_unset=True),
            "model": {"path": str(model), "dtype": "float32", "max_length": 64},
            "trainer": {"lora": {}},
        }
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", hidden=32, layers=1)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("whole", "it is a whole model, and this generator is configured with trainer.lora"),
        ("rank", "it is an adapter of rank 8, and this generator's trainer.lora.rank is 16"),
        ("alpha", "it is an adapter of alpha 16, and this generator's trainer.lora.alpha is 32"),
        ("base", "it is an adapter of another model than this generator's model.path"),
    ],
)
async def test_weights_that_are_not_for_this_generator_are_rejected_and_the_old_ones_stay(
    config: TidemillConfig, broker: Broker, tmp_path: Path, model: Path, kind: str, reason: str
) -> None:
    other = make_tiny_model(tmp_path / "other", seed=1, hidden=32, layers=1)
    wrong = {
        "whole": None,
        "rank": adapter_of(model, rank=8),
        "alpha": adapter_of(model, alpha=16.0),
        "base": adapter_of(other),
    }[kind]

    async with updating(with_lora(config, model), broker, tmp_path, adapter_of(model)) as (updates, engine, training):
        publish_weights(broker, training.leader_term, 2, tmp_path, keep=2, adapter=wrong)
        assert f"weights version 2 is not for this generator: {reason}" in await alarm(broker)
        publish_weights(broker, training.leader_term, 3, tmp_path, keep=2, adapter=adapter_of(model))
        assert await updates.wait_ready(3)
        assert engine.versions == [1, 3]


async def test_a_generator_without_lora_ends_when_there_is_nothing_but_an_adapter(
    config: TidemillConfig, broker: Broker, tmp_path: Path, model: Path
) -> None:
    with pytest.raises(InfraError, match="configured without"):
        async with updating(config, broker, tmp_path, adapter_of(model)):
            raise AssertionError("version 1 is in use")
    found = broker.weights.read_rejections()
    assert (found.version, found.count, found.generators, found.usable) == (1, 1, {"g"}, False)
    assert "configured without" in found.last


async def test_a_rejection_counts_only_when_it_leaves_a_generator_without_weights(
    config: TidemillConfig, broker: Broker, tmp_path: Path, model: Path
) -> None:
    async with updating(with_lora(config, model), broker, tmp_path, adapter_of(model)) as (updates, _, training):
        await wait_until(lambda: broker.weights.read_rejections().usable)
        publish_weights(broker, training.leader_term, 2, tmp_path, keep=2, adapter=adapter_of(model, rank=8))
        assert "version 2 is not for this generator" in await alarm(broker)
        assert await updates.wait_ready(1)
    found = broker.weights.read_rejections()
    assert (found.version, found.count, found.usable) == (1, 0, True)


async def test_a_sleeping_engine_loads_at_its_wake(config: TidemillConfig, broker: Broker, tmp_path: Path) -> None:
    async with updating(config, broker, tmp_path) as (updates, engine, training):
        await updates._orders.lend_device(True)
        for version in (2, 3):
            publish_weights(broker, training.leader_term, version, tmp_path, keep=2)
        await asyncio.sleep(0.2)
        assert engine.versions == [1]
        await updates.check_woken(StopFlag())
        assert engine.versions == [1, 3]
        await updates._orders.lend_device(False)
        publish_weights(broker, training.leader_term, 4, tmp_path, keep=2)
        assert await updates.wait_ready(4)
        assert engine.versions == [1, 3, 4]


async def test_an_engine_that_wakes_with_the_newest_weights_is_probed_and_ends_if_they_are_spoiled(
    config: TidemillConfig, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([None, "fails its probe"])
    async with updating(config, broker, tmp_path) as (updates, engine, _):
        await updates._orders.lend_device(True)

        async def probe(manifest: Manifest) -> str | None:
            assert manifest.version == 1
            return next(answers)

        monkeypatch.setattr(updates, "_probe", probe)
        await updates.check_woken(StopFlag())
        with pytest.raises(InfraError, match="after its engine's sleep fails its probe"):
            await updates.check_woken(StopFlag())
        assert engine.versions == [1]
        await updates._orders.end()


async def test_an_update_that_waits_is_left_to_the_wake(config: TidemillConfig, broker: Broker, tmp_path: Path) -> None:
    """With update drain, an episode that waits for the engine keeps its weights, and none waits for the other."""
    config.generator.update = "drain"
    async with updating(config, broker, tmp_path) as (updates, engine, training):
        async with updates.using(1, False):
            publish_weights(broker, training.leader_term, 2, tmp_path, keep=2)
            await wait_until(lambda: updates._draining)
            await updates._orders.lend_device(True)
            await updates.check_woken(StopFlag())
            await updates._orders.lend_device(False)
            assert engine.versions == [1]
        assert await updates.wait_ready(2)
        assert engine.versions == [1, 2]
