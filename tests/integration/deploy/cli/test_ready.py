"""``tidemill ready``: what health checks of containers ask, on a real server."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from broker.client import Broker
from schemas.codec import encode
from schemas.messages import Heartbeat
from tests.support.broker.trainer_sessions import take_over
from tests.support.runs.command_line import run_tidemill

pytestmark = pytest.mark.integration

CONFIG = """
run: {name: ready-run}
model: {path: m}
train: {name: arithmetic}
reward: {terms: [{name: exact}]}
"""


def test_a_service_is_ready_from_its_first_heartbeat_until_it_falls_silent(
    make_broker: Callable[..., Broker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = make_broker("ready-run")
    take_over(broker)
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "redis_url").write_text(f"{broker.connection.url}\n")
    monkeypatch.delenv("REDIS_URL", raising=False)
    monkeypatch.setenv("REDIS_URL_FILE", "redis_url")
    ready = partial(run_tidemill, "ready", "config.yaml", cwd=tmp_path)
    done = ready("feeder")
    assert (done.returncode, done.stderr) == (1, "tidemill: feeder has not come up\n")
    answer = json.loads(ready("feeder", "--json").stdout)
    assert answer == {"service": "feeder", "ready": False, "problem": "feeder has not come up"}
    beat = Heartbeat(service="feeder", role="feeder", host="h", pid=1, state="running")
    broker.heartbeats.send(beat)
    done = ready("feeder")
    assert (done.returncode, done.stderr) == (0, "")
    assert ready("reward", "--name", "reward-7").returncode == 1
    beat.time -= 100
    broker.connection.client.hset(broker.connection.keys.services, "feeder", encode(beat))
    done = ready("feeder")
    assert done.returncode == 1
    assert "feeder has been silent for 1" in done.stderr
