"""Mishaps that are mended are counted: leases that expired, duplicates, late samples, zombies; and commits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from broker.client import Broker
from broker.telemetry.heartbeats import FORGOTTEN_S
from schemas.codec import encode
from schemas.errors import FencedError
from schemas.messages import Heartbeat, Score
from tests.support.broker.prompt_groups import make_task, make_trajectory
from tests.support.broker.trainer_sessions import take_over

pytestmark = pytest.mark.integration


def test_leases_duplicates_and_late_samples_are_counted(broker: Broker) -> None:
    take_over(broker)
    broker.ledger.admit(make_task(0))
    first, second = broker.task_queue("first"), broker.task_queue("second")
    first.read(1, 10)
    assert second.claim_stale(0.0, 10)
    second.publish(0, [make_trajectory(0, 0)])
    assert first.publish(0, [make_trajectory(0, 0), make_trajectory(0, 1)]) == ["dup", "ok"]
    assert first.publish(7, [make_trajectory(7, 0)]) == ["closed"]
    scores = broker.score_queue("r")
    items = scores.read(2, 10)
    scores.publish([(item, Score(reward=1.0)) for item in items])
    assert scores.publish([(items[0], Score(reward=1.0))]) == ["dup"]
    assert broker.ledger.read_state().counters == {
        "leases_expired:generators": 1,
        "duplicate:publish": 1,
        "closed": 1,
        "duplicate:score": 1,
    }


def test_a_replaced_trainer_is_counted(make_broker: Callable[..., Broker]) -> None:
    broker = make_broker("zombie")
    old = take_over(broker)
    take_over(broker)
    with pytest.raises(FencedError):
        old.finish_run()
    with pytest.raises(FencedError):
        old.read_pipeline()
    assert broker.ledger.read_state().counters == {"fenced": 2}


def test_counting_harms_nothing_when_its_key_is_something_else(broker: Broker) -> None:
    take_over(broker)
    broker.ledger.admit(make_task(0))
    queue = broker.task_queue("g")
    queue.read(1, 10)
    queue.publish(0, [make_trajectory(0, 0)])
    broker.connection.client.set(broker.connection.keys.counters, "hello")
    assert queue.publish(0, [make_trajectory(0, 0)]) == ["dup"]


def test_many_services_beat_in_one_call(broker: Broker) -> None:
    now = broker.heartbeats.read_clock()
    beats = [
        Heartbeat(service=f"g-{number}", role="generator", host="h", pid=1, state="running", time=now)
        for number in range(30)
    ]
    for _ in range(2):
        broker.heartbeats.send_all(beats)
    assert len(broker.heartbeats.list()) == 30


def test_whoever_joins_clears_away_what_left_long_ago_without_a_word(broker: Broker) -> None:
    now = broker.heartbeats.read_clock()

    def beat(name: str, silent_s: float) -> None:
        body = Heartbeat(service=name, role="generator", host="h", pid=1, state="running", time=now - silent_s)
        broker.connection.client.hset(broker.connection.keys.services, name, encode(body))

    for number in range(50):
        beat(f"gone-{number}", FORGOTTEN_S + 60)
    beat("quiet", FORGOTTEN_S / 2)
    broker.connection.client.hset(broker.connection.keys.services, "broken", b"\xc1")
    fresh = Heartbeat(service="fresh", role="generator", host="h", pid=1, state="running")
    broker.heartbeats.send(fresh)
    assert [one.service for one in broker.heartbeats.list()] == ["fresh", "quiet"]
