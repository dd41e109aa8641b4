"""A generator whose engine hangs ends by itself, and another makes what it had taken."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from broker.client import Broker
from tests.support.one_group import publish_weights
from tests.support.prompt_groups import make_task
from tests.support.tiny_model import make_tiny_model
from tests.support.trainer_sessions import take_over

pytestmark = pytest.mark.integration

ENGINE = """
import asyncio
from producers.engines.scripted import ScriptedEngine

class Hung(ScriptedEngine):
    async def generate(self, *args, **kwargs):
        self._active += 1
        await asyncio.Event().wait()
"""


def test_a_generator_ends_when_its_engine_hangs_and_leaves_its_work_to_others(
    make_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    broker = make_broker("hung")
    training = take_over(broker)
    publish_weights(broker, training.leader_term, 1, tmp_path)
    assert broker.ledger.admit(make_task(0)).answer == "ok"
    (tmp_path / "hung.py").write_text(ENGINE)
    config = {
        "run": {"name": "hung", "folder": str(tmp_path / "run")},
        "model": {"path": str(make_tiny_model(tmp_path / "model")), "dtype": "float32", "max_length": 512},
        "train": {"name": "arithmetic"},
        "reward": {"terms": [{"name": "exact"}]},
        "generator": {"engine": "hung.py:Hung", "stall_s": 0.5},
        "broker": {"url": broker.connection.url},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "deploy.cli", "generator", str(tmp_path / "config.yaml"), "--name", "generator-0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the engine hangs" in done.stdout + done.stderr
    (delivery,) = broker.task_queue("generator-0").read(10, 10)
    assert (delivery.message.task_id, delivery.redelivered) == (0, True)
