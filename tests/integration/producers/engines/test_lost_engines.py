"""A generator whose engine hangs, or whose inference server is lost, ends and hands its samples to another."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from broker.client import Broker
from broker.flow.trainer_session import TrainerSession
from producers.engines.base import EngineSettings
from producers.engines.http import engine as http_engine
from producers.engines.http.engine import HttpEngine
from schemas.config import TidemillConfig
from schemas.errors import OK_EXIT, InfraError
from tests.support.broker.one_group import publish_weights
from tests.support.broker.trainer_sessions import take_over
from tests.support.configurations import minimal_config
from tests.support.models.tiny_model import make_tiny_model
from tests.support.producers import faulty_server
from tests.support.producers.faulty_server import served
from tests.support.producers.generator_service import (
    make_task,
    publish_version,
    read_published,
    run_generator_while,
    wait_until,
)
from tests.support.runs.light_service import start_service

LONG = 400  # tokens
DEADLINE_S = 60.0

ENGINE = """
import asyncio
import time
from pathlib import Path
from producers.engines.scripted import ScriptedEngine

class Hung(ScriptedEngine):
    async def generate(self, *args, **kwargs):
        self._active += 1
        await asyncio.Event().wait()

class Loads(ScriptedEngine):
    async def start(self):
        # In a thread, as real engines do: nothing can take it back.
        await asyncio.to_thread(self._boot)

    def _boot(self):
        (Path(__file__).parent / "loading").touch()
        time.sleep(600)
"""


def config(model: Path, folder: Path, **http: Any) -> TidemillConfig:
    return minimal_config(
        run={"name": "g", "folder": str(folder / "run")},
        model={"path": str(model), "dtype": "float32", "max_length": 512},
        sampling={"n": 2, "max_tokens": LONG},
        generator={"engine": "http", "http": {"dialect": "vllm", **http}, "max_samples": 8},
    )


def engine_of(config: TidemillConfig) -> HttpEngine:
    return HttpEngine(EngineSettings(config.model.path, "float32", 512, 8, http=config.generator.http))


def publish(broker: Broker, training: TrainerSession, model: Path, folder: Path, version: int) -> None:
    content = (model / "model.safetensors").read_bytes()
    publish_version(broker, training, folder, version, content, ((5, 6, 7), (0.0, 0.0)))


def claimed_by_another(broker: Broker) -> set[int]:
    return {item.message.task_id for item in broker.task_queue("other").claim_stale(0.0, 10)}


async def test_a_killed_server_ends_the_generator_and_its_samples_go_to_others(
    model: Path, tmp_path: Path, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process that ends is enough: it is not asked for its health again before the scene is over."""
    monkeypatch.setattr(http_engine, "_HEALTH_EVERY_S", 3600.0)
    settings = config(model, tmp_path, command=[sys.executable, faulty_server.__file__])
    engine = engine_of(settings)
    training = take_over(broker, staleness=100)
    publish(broker, training, model, tmp_path, 1)
    broker.ledger.admit_all([make_task(k, 2, LONG) for k in range(2)])

    async def scenario() -> None:
        await wait_until(lambda: (engine.growth() or 0) > 32)
        (server,) = [
            child
            for child in psutil.Process().children(recursive=True)
            if child.status() != psutil.STATUS_ZOMBIE and child.cmdline()[1:2] == [faulty_server.__file__]
        ]
        assert server.net_connections("tcp") == []
        os.kill(server.pid, signal.SIGKILL)
        await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as caught:
        await run_generator_while(settings, broker, engine, scenario)
    assert caught.group_contains(InfraError, match="was killed by signal 9")
    assert claimed_by_another(broker) == {0, 1}


async def test_nothing_sampled_after_a_failed_update_leaves(model: Path, tmp_path: Path, broker: Broker) -> None:
    training = take_over(broker, staleness=100)
    publish(broker, training, model, tmp_path, 1)
    broker.ledger.admit_all([make_task(0, 2, 4), *(make_task(k, 2, LONG) for k in (1, 2))])

    async with served() as server:
        server.token_s = 0.05  # 20 s a sample, many times what an update takes
        settings = config(model, tmp_path, url=server.url)
        engine = engine_of(settings)

        async def scenario() -> None:
            assert len(await read_published(broker, 2)) == 2
            await wait_until(lambda: (engine.growth() or 0) > 40)
            server.answers["/update_weights"] = (400, {"error": "weights were updated, the cache was not"})
            publish(broker, training, model, tmp_path, 2)
            await asyncio.Event().wait()

        with pytest.raises(ExceptionGroup) as caught:
            await run_generator_while(settings, broker, engine, scenario)
    assert caught.group_contains(InfraError, match="the cache was not")
    assert claimed_by_another(broker) == {1, 2}
    published = await read_published(broker, 2)
    assert {item.task_id for item in published} == {0}
    assert {span.version for item in published for span in item.spans} == {1}


def write_config(folder: Path, engine: str, url: str) -> Path:
    (folder / "hung.py").write_text(ENGINE)
    config = {
        "run": {"name": "hung", "folder": str(folder / "run")},
        "model": {"path": str(make_tiny_model(folder / "model")), "dtype": "float32", "max_length": 512},
        "train": {"name": "arithmetic"},
        "reward": {"terms": [{"name": "exact"}]},
        "generator": {"engine": f"hung.py:{engine}", "stall_s": 0.5},
        "broker": {"url": url},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def test_a_generator_whose_engine_hangs_leaves_its_work(make_broker: Callable[..., Broker], tmp_path: Path) -> None:
    broker = make_broker("hung")
    training = take_over(broker)
    publish_weights(broker, training.leader_term, 1, tmp_path)
    assert broker.ledger.admit(make_task(0)).answer == "ok"
    file = write_config(tmp_path, "Hung", broker.connection.url)
    with (tmp_path / "output.txt").open("w") as output:
        process = start_service("generator", file, "generator-0", broker.connection.url, output=output)
    try:
        code = process.wait(2 * DEADLINE_S)
    finally:
        process.kill()
    told = (tmp_path / "output.txt").read_text()
    assert code == 1, told
    assert "the engine hangs" in told
    (delivery,) = broker.task_queue("generator-0").read(10, 10)
    assert (delivery.message.task_id, delivery.redelivered) == (0, True)


def test_a_generator_asked_to_end_in_a_load_ends_at_once(make_broker: Callable[..., Broker], tmp_path: Path) -> None:
    broker = make_broker("hung")
    file = write_config(tmp_path, "Loads", broker.connection.url)
    with start_service("generator", file, "loads", broker.connection.url) as process:
        try:
            deadline = time.monotonic() + DEADLINE_S
            while not (tmp_path / "loading").exists():
                assert time.monotonic() < deadline, "the engine does not load"
                time.sleep(0.02)
            process.terminate()
            # Less than supervisor.grace_s, after which it would be killed.
            assert process.wait(15) == OK_EXIT
        finally:
            process.kill()
    assert "loads" not in {beat.service for beat in broker.heartbeats.list()}
