"""Heartbeats never delay leases, and keep a service's name."""

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from broker import heartbeat
from broker.client import Broker
from broker.heartbeat import HeartbeatThread, check_name
from broker.telemetry.heartbeats import COUNTED
from schemas.errors import InfraError
from schemas.messages import Heartbeat
from schemas.system.processes import find_place
from tests.support.runs.command_line import run_tidemill


def test_leases_are_renewed_while_no_sign_of_life_can_be_sent(broker: Broker) -> None:
    broker.connection.client.set(broker.connection.keys.services, "hello")
    renewed = threading.Semaphore(0)
    with HeartbeatThread(broker, "g", "generator", lambda: ("running", 0, {}), renewed.release, renew_s=0.01):
        for _ in range(2):
            assert renewed.acquire(timeout=10)
        broker.connection.client.delete(broker.connection.keys.services)
        for _ in range(10):
            assert renewed.acquire(timeout=10)
            if broker.heartbeats.list():
                break
        assert [beat.service for beat in broker.heartbeats.list()] == ["g"]
    assert broker.heartbeats.list() == []


def test_a_service_ends_though_it_cannot_sign_off(broker: Broker) -> None:
    broker.connection.client.set(broker.connection.keys.services, "hello")
    ended = threading.Event()

    def live() -> None:
        with HeartbeatThread(broker, "g", "generator", lambda: ("running", 0, {})):
            pass
        ended.set()

    thread = threading.Thread(target=live, daemon=True)
    thread.start()
    assert ended.wait(20), "it waits for a key that only a trainer mends"


@contextmanager
def another_process(broker: Broker, pid: int, place: str) -> Iterator[None]:
    """A service named reward-a that beats ten times a second."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.1):
            broker.heartbeats.send(
                Heartbeat(service="reward-a", role="reward", host="h", pid=pid, state="running", place=place)
            )

    thread = threading.Thread(target=beat)
    broker.heartbeats.send(
        Heartbeat(service="reward-a", role="reward", host="h", pid=pid, state="running", place=place)
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(10)


@pytest.mark.parametrize("place", ["", "another system", find_place()], ids=["unknown", "elsewhere", "here"])
def test_a_name_that_a_living_process_has_is_refused(broker: Broker, place: str) -> None:
    with another_process(broker, os.getppid(), place):
        with pytest.raises(InfraError, match=r"reward-a runs already, with process id .* --name reward-a-b"):
            check_name(broker, "reward-a")
        check_name(broker, "reward-b")


def test_a_second_reward_service_of_one_name_ends_with_one_line(broker: Broker, tmp_path: Path) -> None:
    config = f"""
run: {{name: {broker.connection.keys.run}}}
broker: {{url: "{broker.connection.url}"}}
model: {{path: m}}
train: {{name: arithmetic}}
reward: {{terms: [{{name: exact}}]}}
"""
    (tmp_path / "config.yaml").write_text(config)
    with another_process(broker, os.getppid(), find_place()):
        done = run_tidemill("reward", "config.yaml", "--name", "reward-a", cwd=tmp_path)
    assert done.returncode == 1
    assert "reward-a runs already" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_name_is_free_as_soon_as_its_process_is_dead(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "WATCH_S", 3600.0)
    dead = subprocess.Popen(["true"])
    dead.wait(10)
    beat = Heartbeat(service="g", role="generator", host="h", pid=dead.pid, state="running", place=find_place())
    broker.heartbeats.send(beat)
    check_name(broker, "g")
    beat.pid = os.getpid()
    broker.heartbeats.send(beat)
    check_name(broker, "g")


def test_a_name_is_free_when_its_remote_process_is_silent(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "WATCH_S", 0.3)
    broker.heartbeats.send(Heartbeat(service="g", role="generator", host="h", pid=1, state="running", place="x"))
    check_name(broker, "g")


def test_of_two_that_look_for_a_name_at_the_same_moment_one_gets_it_though_it_stands_still(
    broker: Broker,
) -> None:
    other = Heartbeat(service="g", role="generator", host="h", pid=1, state="running", place="another system")

    def describe() -> tuple[str, int, dict[str, float]]:
        """Called for the first heartbeat, after the look: in between the other one, too, has found the name free."""
        broker.heartbeats.send(other)
        return "loading", 0, {}

    begun = HeartbeatThread(broker, "g", "generator", describe, sole=True)
    with pytest.raises(InfraError, match="g runs already, with process id 1 on h"), begun:
        pytest.fail("both have the name")
    assert [beat.pid for beat in broker.heartbeats.list()] == [1], "the rejected one is not listed"


def test_a_name_is_free_whatever_another_version_of_tidemill_left_under_it(broker: Broker) -> None:
    broker.connection.client.hset(broker.connection.keys.services, "g", b"of another version")
    with HeartbeatThread(broker, "g", "generator", lambda: ("loading", 0, {}), sole=True):
        assert broker.heartbeats.read("g") is not None


def test_a_name_is_claimed_by_one_process_and_again_when_the_answer_to_it_is_lost(broker: Broker) -> None:
    def beat(pid: int) -> Heartbeat:
        return Heartbeat(service="g", role="generator", host="h", pid=pid, state="loading", place="x")

    assert broker.heartbeats.claim(beat(1), b"") == COUNTED
    left = broker.heartbeats.read_bytes("g")
    assert broker.heartbeats.claim(beat(2), b"") == left
    assert broker.heartbeats.claim(beat(2), left) == COUNTED, "it is known to be dead"
    assert broker.heartbeats.claim(beat(3), left) == broker.heartbeats.read_bytes("g")
    broker.heartbeats.remove("g")
    assert broker.heartbeats.claim(beat(3), left) == COUNTED, "it has ended meanwhile"
    answers: list[object] = []
    lose_first_answer(broker, answers)
    assert broker.heartbeats.claim(beat(4), broker.heartbeats.read_bytes("g")) == COUNTED
    assert answers == [b"ok", b"ok"]


def lose_first_answer(broker: Broker, answers: list[object]) -> None:
    """From now on the answer to the first script that runs gets lost, after it ran."""
    real = broker.connection._evaluate

    def evaluate(*args: Any) -> Any:
        answers.append(real(*args))
        if len(answers) == 1:
            raise redis.ConnectionError("lost")
        return answers[-1]

    broker.connection._evaluate = evaluate  # type: ignore[method-assign]


def test_a_service_ends_without_a_broker_that_hangs(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answered, ended = threading.Event(), threading.Event(), threading.Event()

    def hang(service: str) -> None:
        asked.set()
        answered.wait(120)

    monkeypatch.setattr(broker.heartbeats, "remove", hang)

    def live() -> None:
        with HeartbeatThread(broker, "g", "generator", lambda: ("running", 0, {})):
            pass
        ended.set()

    thread = threading.Thread(target=live, daemon=True)
    thread.start()
    try:
        assert ended.wait(30)
        assert asked.is_set(), "it tries to sign off"
    finally:
        answered.set()
        thread.join(30)
