"""A generator whose engine hangs, at work or while it loads, ends all the same, and another makes what it had taken."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from broker.client import Broker
from schemas.errors import OK_EXIT
from tests.support.broker.one_group import publish_weights
from tests.support.broker.prompt_groups import make_task
from tests.support.broker.trainer_sessions import take_over
from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.light_service import start_service

pytestmark = pytest.mark.integration
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


def test_a_generator_ends_when_its_engine_hangs_and_leaves_its_work_to_others(
    make_broker: Callable[..., Broker], tmp_path: Path
) -> None:
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


def test_a_generator_that_is_asked_to_end_while_its_engine_loads_ends_at_once(
    make_broker: Callable[..., Broker], tmp_path: Path
) -> None:
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
