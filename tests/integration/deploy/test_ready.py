"""``tidemill ready``: what health checks of containers ask, on a real server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.client import Broker
from schemas.codec import encode
from schemas.messages import Heartbeat
from tests.support.trainer_sessions import begin

pytestmark = pytest.mark.integration

CONFIG = """
run: {name: ready-run}
model: {path: m}
train: {name: arithmetic}
reward: {terms: [{name: exact}]}
"""


def ready(folder: Path, url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "redis_url").write_text(f"{url}\n")
    environment = {key: value for key, value in os.environ.items() if key != "REDIS_URL"}
    return subprocess.run(
        [sys.executable, "-m", "deploy.cli", "ready", "config.yaml", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=folder,
        env={**environment, "REDIS_URL_FILE": "redis_url"},
    )


def test_a_service_is_ready_from_its_first_heartbeat_until_it_falls_silent(
    make_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    broker = make_broker("ready-run")
    begin(broker)
    url = broker.link.url
    done = ready(tmp_path, url, "feeder")
    assert (done.returncode, done.stderr) == (1, "tidemill: feeder has not come up\n")
    beat = Heartbeat(service="feeder", role="feeder", host="h", pid=1, state="running")
    broker.services.beat(beat)
    done = ready(tmp_path, url, "feeder")
    assert (done.returncode, done.stderr) == (0, "")
    assert ready(tmp_path, url, "reward", "--name", "reward-7").returncode == 1
    beat.time -= 100
    broker.link.client.hset(broker.link.keys.services, "feeder", encode(beat))
    done = ready(tmp_path, url, "feeder")
    assert done.returncode == 1
    assert "feeder has been silent for 1" in done.stderr
