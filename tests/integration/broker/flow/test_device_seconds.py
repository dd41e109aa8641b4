"""The ledger of device seconds: each of one use, whatever dies in between, and as many as the broker's clock counts."""

import time

import pytest

from broker.client import Broker
from broker.device_clock import DeviceClock
from broker.heartbeat import HeartbeatThread
from broker.telemetry.heartbeats import COUNTED
from schemas.messages import Heartbeat
from tests.support.broker.trainer_sessions import take_over


class Clocked:
    """The heartbeats of one name, at times that the test gives."""

    def __init__(self, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broker = broker
        self.now = self.start = float(int(time.time()))
        monkeypatch.setattr("broker.telemetry.heartbeats.Heartbeats.read_clock", lambda *_: self.now)

    def process(self, pid: int, began: float, devices: int = 1) -> tuple[DeviceClock, HeartbeatThread]:
        clock = DeviceClock(devices, lambda: self.now, age_s=self.now - began)
        beats = HeartbeatThread(self.broker, "g", "generator", lambda: ("running", 0, {}), clock=clock)
        original = beats._make_heartbeat

        def make() -> Heartbeat:
            beat = original()
            beat.pid = pid
            return beat

        beats._make_heartbeat = make  # type: ignore[method-assign]
        return clock, beats

    def seconds(self) -> dict[str, float]:
        return self.broker.ledger.read_state().devices["generator"]


@pytest.fixture
def clocked(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Clocked:
    take_over(broker)
    return Clocked(broker, monkeypatch)


def test_every_second_is_of_one_use_and_all_are_held(clocked: Clocked) -> None:
    clock, beats = clocked.process(1, began=clocked.start - 10.0, devices=2)
    for use in ("wait", "compute", "pause", "asleep"):
        beats._beat()
        clock.turn(use)
        clocked.now += 4.0
    beats._beat()
    assert clocked.seconds() == {"load": 20, "wait": 8, "compute": 8, "pause": 8, "asleep": 8, "held": 52}


def test_the_time_from_a_death_to_the_successor_is_load(clocked: Clocked) -> None:
    clock, beats = clocked.process(1, began=clocked.start)
    clock.turn("compute")
    clocked.now += 5.0
    beats._beat()
    # It is killed; the next one begins 3 s later and is heard after 2 more.
    clocked.now += 5.0
    clock, beats = clocked.process(2, began=clocked.now - 2.0)
    beats._beat()
    clock.turn("wait")
    clocked.now += 1.0
    beats._beat()
    assert clocked.seconds() == {"compute": 5, "load": 5, "wait": 1, "held": 11}


def test_a_lost_answer_counts_once(clocked: Clocked, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, beats = clocked.process(1, began=clocked.start)
    clock.turn("compute")
    clocked.now += 2.0
    with monkeypatch.context() as patch:
        patch.setattr(HeartbeatThread, "_note", lambda *_: None)
        beats._beat()
    clocked.now += 2.0
    beats._beat()
    assert clocked.seconds() == {"load": 0, "compute": 4, "held": 4}


def test_what_passes_before_there_are_counts_is_counted_later(clocked: Clocked) -> None:
    clock, beats = clocked.process(1, began=clocked.start)
    clock.turn("compute")
    clocked.now += 2.0
    beats._beat()
    before = clocked.broker.ledger.read_state()
    clocked.broker.connection.client.flushall()
    for _ in range(2):
        clocked.now += 3.0
        beats._beat()
    assert not clocked.broker.ledger.read_state().devices
    counts = {f"device:generator:{use}": int(1000 * of) for use, of in before.devices["generator"].items()}
    take_over(clocked.broker, fresh=False, counts=counts)
    clocked.now += 1.0
    beats._beat()
    assert clocked.seconds() == {"load": 0, "compute": 9, "held": 9}


def test_two_processes_of_one_name_share_the_time(clocked: Clocked) -> None:
    clock, frozen = clocked.process(1, began=clocked.start)
    clock.turn("wait")
    frozen._beat()
    clocked.now += 10.0
    _, successor = clocked.process(2, began=clocked.now - 4.0)
    successor._beat()
    frozen._beat()
    assert clocked.seconds() == {"load": 10, "wait": 0, "held": 10}
    clocked.now += 1.0
    successor._beat()
    assert clocked.seconds()["held"] == 11


def test_a_service_without_devices_counts_nothing(clocked: Clocked) -> None:
    beat = Heartbeat(service="feeder", role="feeder", host="h", pid=1, state="running")
    assert clocked.broker.heartbeats.send(beat) == COUNTED
    assert clocked.broker.ledger.read_state().devices == {}
