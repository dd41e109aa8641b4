"""``tidemill broker``: a server that other machines reach, with a password, which keeps what it stored.

Also how `tidemill up` waits for the server of its own.
"""

import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from broker.connection.connection import open_client
from broker.connection.embedded import EmbeddedServer
from deploy.client import find
from deploy.run import up
from deploy.run.up import SupervisedRun
from deploy.supervisor.process import Processes
from deploy.supervisor.supervisor import Supervisor
from tests.support.configurations import minimal_config
from tests.support.runs.programs import free_port

DEADLINE_S = 60.0
CONFIG = "model: {path: m}\ntrain: {name: arithmetic}\nreward: {terms: [{name: exact}]}\n"

Serve = Callable[[], "subprocess.Popen[str]"]


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def serve(tmp_path: Path, port: int) -> Iterator[Serve]:
    """Starts the command; whatever it left is killed at the end."""
    (tmp_path / "config.yaml").write_text(f"{CONFIG}run: {{folder: {tmp_path / 'run'}}}\n")
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "deploy.cli", "broker", str(tmp_path / "config.yaml")]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        (tmp_path / "run" / "redis_url").unlink(missing_ok=True)
        started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=DEADLINE_S)


def url(folder: Path) -> str:
    """Its URL, once it is there."""
    file = folder / "run" / "redis_url"
    wait_for("a URL", file.is_file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    return file.read_text().strip()


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S:.0f} s for {what}"
        time.sleep(0.02)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_who_knows_the_url_gets_in_and_finds_its_data_after_a_restart(tmp_path: Path, port: int, serve: Serve) -> None:
    process = serve()
    first = url(tmp_path)
    redis.Redis.from_url(first).set("key", "value")
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(port=port).get("key")
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 0
    assert not is_open(port)
    serve()
    assert url(tmp_path) == first
    assert redis.Redis.from_url(first).get("key") == b"value"


def test_it_is_never_left_behind(tmp_path: Path, port: int, serve: Serve) -> None:
    process = serve()
    url(tmp_path)
    process.kill()
    wait_for("its server to end", lambda: not is_open(port))


def test_two_never_write_the_same_data(tmp_path: Path, serve: Serve) -> None:
    serve()
    url(tmp_path)
    late = serve()
    assert late.wait(DEADLINE_S) == 2
    assert late.stderr is not None
    assert "another `tidemill broker` uses" in late.stderr.read()


def test_it_keeps_off_the_data_of_an_embedded_server(tmp_path: Path, serve: Serve) -> None:
    with EmbeddedServer(tmp_path / "run" / "broker"):
        process = serve()
        assert process.wait(DEADLINE_S) == 2
        assert process.stderr is not None
        assert "`tidemill up` has a broker in" in process.stderr.read()


def test_a_copied_folder_does_not_lead_to_the_server_of_the_original(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "run" / "broker") as original:
        shutil.copytree(tmp_path / "run", tmp_path / "copy", symlinks=True, ignore=lambda *_: ["broker.sock"])
        assert find.embedded(tmp_path / "run") == original.url
        assert find.embedded(tmp_path / "copy") is None
        with pytest.raises(redis.RedisError):
            open_client(EmbeddedServer(tmp_path / "copy" / "broker").url).ping()
    assert find.embedded(tmp_path / "run") is None


def test_a_port_that_is_taken_is_an_error(port: int, serve: Serve) -> None:
    with socket.socket() as other:
        # It does not listen, else what looks whether the new server answers would wait for this one.
        other.bind(("0.0.0.0", port))
        process = serve()
        assert process.wait(DEADLINE_S) == 1
        assert process.stderr is not None
        assert "the broker's server ended" in process.stderr.read()


def test_a_run_waits_for_an_embedded_broker_as_long_as_it_says_that_it_loads_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = minimal_config(run={"name": "slow", "folder": str(tmp_path / "run")}, model={"path": "nowhere"})
    with EmbeddedServer(config.folder / "broker") as server:
        pipeline = open_client(server.url).pipeline()
        for number in range(8192):
            pipeline.set(f"key-{number}", number)
        pipeline.execute()
    command = EmbeddedServer.command
    # More than four seconds for all keys.
    monkeypatch.setattr(EmbeddedServer, "command", lambda self: [*command(self), "--key-load-delay", "500"])
    monkeypatch.setattr(up, "BROKER_DEADLINE_S", 2.0)
    monkeypatch.setenv("REDIS_URL", "")
    with Supervisor(config.supervisor, config.folder / "logs") as supervisor:
        run = SupervisedRun(config, tmp_path / "config.yaml", Processes())
        assert run._start_broker(supervisor) is None
        assert open_client(run.environment["REDIS_URL"]).dbsize() == 8192
        supervisor.stop()
