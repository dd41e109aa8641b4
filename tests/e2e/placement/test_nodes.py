"""Machines that join a run by ``tidemill node``: two of them imitated on this one, each with a pool of its own."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from broker.client import Broker
from broker.connection.connection import Connection
from broker.connection.embedded import EmbeddedServer
from broker.connection.keys import Keys
from deploy.services.main import command
from schemas.config import BrokerConfig
from schemas.errors import ERROR_EXIT, OK_EXIT
from tests.support.models.tiny_model import make_tiny_model
from tests.support.runs.up_runs import UpRun, trained_samples

pytestmark = pytest.mark.e2e


class Machine:
    """A machine with a folder of its own, whose supervisor is started, killed and started again."""

    def __init__(self, folder: Path, config: dict[str, Any], name: str, url: str) -> None:
        self.name, self.folder = name, folder / name
        self.folder.mkdir()
        self.file = self.folder / "my.yaml"
        self.file.write_text(yaml.safe_dump({**config, "run": {"name": "e2e", "folder": str(self.folder / "run")}}))
        self.url = self.folder / "redis_url"
        self.url.write_text(f"{url}\n")
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        self.process = subprocess.Popen(
            command("node", str(self.file), "--name", self.name, "--broker", str(self.url)),
            env={key: value for key, value in os.environ.items() if not key.startswith("REDIS_URL")},
            stdout=(self.folder / "out").open("ab"),
            stderr=subprocess.STDOUT,
        )
        return self.process

    def family(self) -> list[psutil.Process]:
        found: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return found


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path / "broker")
    server.start()
    yield server
    server.stop()


def settings(folder: Path, pools: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """Return a configuration whose generators do not compute, for each machine."""
    return {
        "model": {"path": str(make_tiny_model(folder / "model")), "dtype": "float32", "max_length": 32},
        "train": {"name": "arithmetic"},
        "sampling": {"n": 4, "max_tokens": 16},
        "reward": {"terms": [{"name": "exact"}]},
        "generator": {
            "engine": "scripted",
            "args": {"token_s": 0.03, "min_length": 8, "max_length": 16},
            "max_samples": 16,
            "lease_s": 3,
            "probe_tolerance": 1e3,
        },
        "pools": pools,
        "trainer": {
            "steps": 100_000,
            "batch_groups": 8,
            "threads": 1,
            "advantage": {"keep_zero_variance": True},
            "mismatch": {"action": "report"},
            "publish": {"transport": "redis"},
        },
        "control": {"port": 0},
        "supervisor": {"max_restarts": 20, "backoff_s": 0.2},
        **sections,
    }


@pytest.mark.timeout(300)
def test_a_machine_is_lost_and_comes_back_and_nothing_is_lost_or_trained_twice(
    server: EmbeddedServer, tmp_path: Path
) -> None:
    pools = {
        "one": {"nodes": ["left"], "generator": {"replicas": 2}},
        "other": {"nodes": ["r*"], "env": {"SEARCH": "/own:$OF_MACHINE"}},
    }
    own = settings(tmp_path, pools, control={"enabled": False})
    broker = Broker(Connection(server.url, Keys("tidemill", "e2e"), 10), BrokerConfig())

    def at_work() -> dict[str, float]:
        beats = [beat for beat in broker.heartbeats.list() if beat.role == "generator"]
        return {beat.service: beat.figures.get("samples_in_flight", 0) for beat in beats}

    run = UpRun(tmp_path, {**own, "broker": {"url": server.url}})
    left, right = (Machine(tmp_path, own, name, server.url) for name in ("left", "right"))
    try:
        run.wait_until(
            lambda: all(at_work().get(f"generator-one-left-{number}", 0) for number in (0, 1)), "left's work"
        )
        run.wait_until(lambda: at_work().get("generator-other-right-0", 0) > 0, "right's work")
        family = left.family()
        left.process.send_signal(signal.SIGKILL)
        left.process.wait(10)
        run.wait_until(lambda: not any(process.is_running() for process in family), "end of all of the machine")
        lost_at = run.steps()
        run.wait_until(lambda: run.steps() >= lost_at + 5, "five steps without it")
        killed = {beat.pid for beat in broker.heartbeats.list() if beat.service == "generator-one-left-0"}
        left.start()

        def is_back() -> bool:
            beats = [beat for beat in broker.heartbeats.list() if beat.service == "generator-one-left-0"]
            return any(beat.pid not in killed and beat.figures.get("samples_in_flight") for beat in beats)

        run.wait_until(is_back, "work of the machine that is back")
        second = Machine(tmp_path / "left", own, "left", server.url)
        assert second.process.wait(60) == ERROR_EXIT
        assert "node-left runs already" in (second.folder / "out").read_text()
        roles = {beat.service: beat.role for beat in broker.heartbeats.list()}
        assert {roles.get("node-left"), roles.get("node-right")} == {"node"}
        broker.ledger.change_settings({"steps": run.steps() + 5})
        run.finish_whole()
        assert (left.process.wait(60), right.process.wait(60)) == (OK_EXIT, OK_EXIT)
    finally:
        for process in (run.process, left.process, right.process):
            process.kill()
    samples = trained_samples(run)
    assert len(samples) == len(set(samples)) == run.steps() * 8 * 4
    assert not [name for name in os.listdir(run.folder / "logs") if name.startswith("generator")]


@pytest.mark.matrix("one machine's loss is in make test; how an order is dealt out is a unit test")
@pytest.mark.timeout(300)
def test_a_pool_on_two_machines_has_as_many_generators_as_are_ordered(server: EmbeddedServer, tmp_path: Path) -> None:
    own = settings(tmp_path, {"far": {"nodes": ["*"], "generator": {"replicas": 2}}})
    run = UpRun(tmp_path, {**own, "broker": {"url": server.url}})
    left, right = (Machine(tmp_path, own, name, server.url) for name in ("left", "right"))

    def generators() -> list[str]:
        return [one["name"] for one in run.ask("/v1/status")["services"] if one["pool"] == "far" and one["live"]]

    everyone = [f"generator-far-{name}-{number}" for name in ("left", "right") for number in (0, 1)]
    try:
        run.wait_until(lambda: run.steps() > 0, "a step")
        run.wait_until(lambda: generators() == everyone, "all generators")
        for number, names in ((3, [everyone[0], *everyone[2:]]), (0, []), (1, [everyone[2]]), (4, everyone)):
            answer = run.ask("/v1/scale", {"role": "generator", "pool": "far", "replicas": number})
            assert answer["changed"]
            run.wait_until(lambda names=names: generators() == names, f"{number} generators")  # type: ignore[misc]
            assert run.ask("/v1/status")["scaling"]["replicas"]["generator.far"] == number
        run.ask("/v1/settings", {"steps": run.steps() + 5}, method="PATCH")
        run.finish_whole()
        assert (left.process.wait(60), right.process.wait(60)) == (OK_EXIT, OK_EXIT)
    finally:
        for process in (run.process, left.process, right.process):
            process.kill()
