"""The end of a run by its real services: its last evaluation ends, and services of a finished run exit."""

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.client import Broker
from broker.connection.embedded import EmbeddedServer
from schemas.config import save_config
from schemas.errors import OK_EXIT
from schemas.run_folder import read_lines
from tests.support.broker.trainer_sessions import take_over
from tests.support.models.tiny_model import make_tiny_model
from tests.support.producers.generator_service import make_config, publish_version
from tests.support.runs.light_service import SETTLED, start_service
from tests.support.runs.pausable_system import PausableSystem, small_config

SAMPLES = 400
ROLES = ("feeder", "generator", "reward", "control")
STEPS = 100
DEADLINE_S = 60.0


@pytest.fixture
def system(
    tmp_path: Path, make_broker: Callable[..., Broker], monkeypatch: pytest.MonkeyPatch
) -> Iterator[PausableSystem]:
    monkeypatch.chdir(tmp_path)
    name = f"last-{tmp_path.name[-12:]}".lower().replace("_", "-")
    model = make_tiny_model(tmp_path / "tiny", hidden=32, layers=1)
    evaluation = {
        "every": 1000,
        "sampling": {"n": 1, "max_tokens": 16},
        "dataset": {"name": "arithmetic", "limit": SAMPLES},
    }
    config = small_config(model, tmp_path, name, {"steps": 2}, eval=evaluation)
    system = PausableSystem(config, lambda: make_broker(name))
    yield system
    system.end(*system.running)
    assert not system.errors


@pytest.mark.parametrize("lost", ["evals", "groups"])
def test_what_the_broker_loses_of_it_is_made_anew(system: PausableSystem, lost: str) -> None:
    system.start_all()
    system.wait("the last evaluation", lambda: bool(system.broker.evals.samples_left(2)))
    system.pause("freeze")
    assert system.broker.evals.samples_left(2), "it is under way"
    system.broker.connection.client.delete(getattr(system.broker.connection.keys, lost))
    system.broker.run_control.pause("none", "test")
    system.wait("the end", lambda: system.broker.ledger.read_state().state == "finished")
    lines = {line["version"]: line for line in read_lines(system.config.folder / "evaluations.jsonl")}
    assert (lines[2]["n"], lines[2]["scored"], lines[2]["failed"]) == (SAMPLES, SAMPLES, 0)


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S:.0f} s for {what}"
        time.sleep(0.05)


def test_services_end_with_their_run_but_not_those_of_one_that_goes_on_and_not_those_that_stay(
    tmp_path: Path, server: EmbeddedServer, make_broker: Callable[..., Broker]
) -> None:
    config = make_config(make_tiny_model(tmp_path / "model"), tmp_path)
    config = config.model_copy(
        update={
            "run": config.run.model_copy(update={"name": "finishes"}),
            "trainer": config.trainer.model_copy(update={"steps": STEPS}),
            "control": config.control.model_copy(update={"port": 0}),
        }
    )
    more = config.model_copy(update={"trainer": config.trainer.model_copy(update={"steps": 2 * STEPS})})
    save_config(config, tmp_path / "config.yaml")
    save_config(more, tmp_path / "more.yaml")
    broker = make_broker("finishes")
    training = take_over(broker, steps=STEPS, step=STEPS)
    publish_version(broker, training, tmp_path, 0)
    started: dict[str, subprocess.Popen[bytes]] = {}

    def start(role: str, name: str, file: str, *options: str) -> None:
        started[name] = start_service(role, tmp_path / file, name, server.url, *options, **{SETTLED: "0.5"})

    def running(names: set[str]) -> bool:
        return names <= {beat.service for beat in broker.heartbeats.list() if beat.state not in ("loading", "starting")}

    try:
        for role in ROLES:
            start(role, role, "config.yaml")
        start("reward", "stays", "config.yaml", "--stay")
        wait_for("all services", lambda: running({*ROLES, "stays"}))
        training.finish_run()
        assert [started[role].wait(DEADLINE_S) for role in ROLES] == [OK_EXIT] * len(ROLES)
        # Two that come when it is finished: for one there is nothing to do, the other waits for the trainer.
        start("reward", "late", "config.yaml")
        start("reward", "waits", "more.yaml")
        assert started["late"].wait(DEADLINE_S) == OK_EXIT
        wait_for("the one that waits", lambda: running({"waits"}))
        take_over(broker, steps=2 * STEPS, step=2 * STEPS, saved=2 * STEPS, fresh=False).finish_run()
        assert started["waits"].wait(DEADLINE_S) == OK_EXIT
        assert started["stays"].poll() is None
    finally:
        for process in started.values():
            process.kill()
            process.wait()
