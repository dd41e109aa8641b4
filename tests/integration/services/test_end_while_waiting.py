"""A service that waits for a broker which is not there ends soon after it is asked to, and says that it was asked."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.connection.embedded import EmbeddedServer
from schemas.config import save_config
from tests.support.configurations import minimal_config
from tests.support.models.tiny_model import make_tiny_model

pytestmark = pytest.mark.integration
SOON_S = 15.0
"""Far below broker.deadline_s, which a service waits for a broker; on a busy machine a process needs some of it."""


@pytest.fixture(params=["refuses", "is silent"])
def no_broker(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a port where nothing listens, or where nothing answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if request.param == "is silent":
            listener.listen(50)
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0"


@pytest.fixture(scope="module")
def configuration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("waiting")
    config = minimal_config(
        run={"name": "waiting", "folder": str(folder / "run")},
        model={"path": str(make_tiny_model(folder / "model", hidden=32, layers=1))},
        generator={"engine": "transformers"},
        broker={"deadline_s": 300},
    )
    save_config(config, folder / "config.yaml")
    return folder / "config.yaml"


def start(role: str, configuration: Path, url: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", START, role, str(configuration)]
    environment = os.environ | {"REDIS_URL": url}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)


START = """
import importlib, sys
from broker.connection.connection import Connection
from deploy.services.main import ROLES
from schemas.config import load_config
role, file = sys.argv[1:]
run = Connection.run
def announced(self, what, *rest):
    print(what, flush=True)
    return run(self, what, *rest)
Connection.run = announced
module, _, function = ROLES[role].partition(":")
getattr(importlib.import_module(module), function)(load_config(file), role)
"""


@pytest.mark.parametrize("role", ["feeder", "reward", "generator", "trainer"])
def test_a_service_that_waits_for_the_broker_ends_with_0(role: str, configuration: Path, no_broker: str) -> None:
    with start(role, configuration, no_broker) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "looking at the server\n"
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(SOON_S) == 0
        finally:
            process.kill()


def test_a_feeder_whose_broker_is_gone_ends_with_0(configuration: Path, tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "broker")
    server.start()
    with start("feeder", configuration, server.url) as process:
        assert process.stdout is not None
        try:
            next(line for line in process.stdout if line == "waiting for a slot\n")
            server.stop()
            process.send_signal(signal.SIGTERM)
            assert process.wait(SOON_S) == 0
        finally:
            process.kill()
