"""A service that waits for a broker which is not there ends soon after it is asked to, and says that it was asked."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.client import Broker
from broker.connection.connection import Connection
from broker.connection.embedded import EmbeddedServer
from broker.connection.keys import Keys
from schemas.config import load_config, save_config
from tests.support.configurations import minimal_config
from tests.support.models.tiny_model import make_tiny_model

pytestmark = pytest.mark.integration
ENDS_WITH_0 = ("feeder", "generator", "reward")
SOON_S, START_S = 15.0, 120.0
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
        generator={"engine": "scripted"},
        broker={"deadline_s": 300},
    )
    save_config(config, folder / "config.yaml")
    return folder / "config.yaml"


def start(role: str, configuration: Path, url: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", START, role, str(configuration)]
    environment = os.environ | {"REDIS_URL": url}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)


START = """
import sys
from broker.connection.connection import Connection
from deploy.services.main import run_role
from schemas.config import load_config
role, file = sys.argv[1:]
run = Connection.run
def announced(self, what, *rest, **options):
    print(what, flush=True)
    return run(self, what, *rest, **options)
Connection.run = announced
run_role(role, load_config(file), role)
"""


@pytest.mark.parametrize("role", ["control", "feeder", "generator", "reward", "trainer"])
def test_a_service_that_waits_for_the_broker_ends(role: str, configuration: Path, no_broker: str) -> None:
    with start(role, configuration, no_broker) as process:
        try:
            assert process.stdout is not None
            next(line for line in process.stdout if line == "looking at the server\n")
            process.send_signal(signal.SIGTERM)
            # The control plane and the trainer's first look take no signal over.
            assert process.wait(SOON_S) in ((0,) if role in ENDS_WITH_0 else (0, -signal.SIGTERM))
        finally:
            process.kill()


@pytest.mark.parametrize("role", ["control", "feeder", "generator", "reward"])
def test_a_service_whose_broker_is_gone_ends_with_0(role: str, configuration: Path, tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "broker") as server, start(role, configuration, server.url) as process:
        try:
            config = load_config(configuration)
            broker = Broker(Connection(server.url, Keys(config.broker.prefix, config.run.name), 60), config.broker)
            end = time.monotonic() + START_S
            while (beat := broker.heartbeats.read(role)) is None or beat.state == "loading":
                assert process.poll() is None, f"the {role} ended"
                assert time.monotonic() < end, f"waited {START_S} s for the {role} to run"
                time.sleep(0.05)
            server.stop()
            process.send_signal(signal.SIGTERM)
            assert process.wait(SOON_S) == 0
        finally:
            process.kill()
