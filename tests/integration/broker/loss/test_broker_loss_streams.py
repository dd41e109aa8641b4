"""Streams, consumer groups, leases and scripts that vanish or are spoilt while services use them."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from broker.client import Broker
from schemas.errors import BrokerLost
from schemas.messages import Score
from tests.support.broker.broker_loss import wipe
from tests.support.broker.prompt_groups import make_task, make_trajectory
from tests.support.broker.trainer_sessions import take_over

pytestmark = pytest.mark.integration


def test_a_score_for_a_broker_that_was_wiped_changes_nothing(broker: Broker) -> None:
    take_over(broker)
    assert broker.ledger.admit(make_task(0)).answer == "ok"
    broker.task_queue("g").publish(0, [make_trajectory(0, i) for i in range(2)])
    rewards = broker.score_queue("r")
    results = rewards.read(10, 10)
    wipe(broker)
    assert rewards.publish([(item, Score(reward=1.0)) for item in results]) == ["dup", "dup"]


@pytest.mark.parametrize("stream", ["tasks", "trajectories", "scored"])
def test_a_deleted_group_or_stream_group_is_made_again_and_nothing_is_trained_twice(
    broker: Broker, stream: str
) -> None:
    training = take_over(broker)
    for task_id in (0, 1):
        assert broker.ledger.admit(make_task(task_id)).answer == "ok"
    queue, rewards = broker.task_queue("g"), broker.score_queue("r")
    deliveries = queue.read(10, 10)
    queue.publish(0, [make_trajectory(0, i) for i in range(2)])
    rewards.publish([(item, Score(reward=1.0)) for item in rewards.read(10, 10)])
    claimed = training.claim_scores(10)
    client, keys = broker.connection.client, broker.connection.keys
    key = getattr(keys, stream)
    for group in client.xinfo_groups(key):
        client.xgroup_destroy(key, group["name"])
    queue.publish(1, [make_trajectory(1, i) for i in range(2)])
    assert len(deliveries) == 2
    for item in rewards.read(10, 10) + rewards.read(10, 10):
        rewards.publish([(item, Score(reward=1.0))])
    claimed += training.claim_scores(10)
    assert sorted((outcome.task_id, outcome.sample) for outcome in claimed) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    queue.read(10, 10)


def test_outcomes_of_groups_that_ended_are_discarded_and_poison_is_kept_for_people(broker: Broker) -> None:
    training = take_over(broker)
    client, keys = broker.connection.client, broker.connection.keys
    client.xadd(keys.scored, {"t": 77, "n": 1, "0:-": b"garbage"})
    client.xadd(keys.scored, {"hello": "world"})
    outcomes = training.claim_scores(10)
    assert [outcome.task_id for outcome in outcomes] == [77, -1]
    training.discard_scores(outcomes)
    assert client.xlen(keys.scored) == 0
    assert client.xlen(keys.dead) == 1


def test_leases_that_a_clock_set_back_has_dated_into_the_future_still_end(broker: Broker) -> None:
    take_over(broker)
    broker.ledger.admit(make_task(0))
    broker.task_queue("dead").read(1, 10)
    client, keys = broker.connection.client, broker.connection.keys
    ((entry, *_),) = [list(item.values()) for item in client.xpending_range(keys.tasks, "generators", "-", "+", 1)]
    seconds, _ = client.time()
    client.xclaim(keys.tasks, "generators", "dead", 0, [entry], time=(seconds + 3600) * 1000, justid=True)
    alive = broker.task_queue("alive")
    assert alive.claim_stale(lease_s=0.05, count=10) == []
    end = time.monotonic() + 10
    found = []
    while not found and time.monotonic() < end:
        time.sleep(0.06)
        found = alive.claim_stale(lease_s=0.05, count=10)
    assert [delivery.message.task_id for delivery in found] == [0]


def test_a_group_that_is_deleted_while_leases_are_dated_is_made_again(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_over(broker)
    broker.ledger.admit(make_task(0))
    broker.task_queue("dead").read(1, 10)
    client, keys = broker.connection.client, broker.connection.keys
    alive = broker.task_queue("alive")
    original, deleted, pending = client.xclaim, [], client.xpending_range

    def xpending_range(*args: Any, **kwargs: Any) -> Any:
        return [item | {"time_since_delivered": 0} for item in pending(*args, **kwargs)]

    def xclaim(*args: Any, **kwargs: Any) -> Any:
        if not deleted:
            deleted.append(client.xgroup_destroy(keys.tasks, "generators"))
        return original(*args, **kwargs)

    monkeypatch.setattr(client, "xpending_range", xpending_range)
    monkeypatch.setattr(client, "xclaim", xclaim)
    for now in (0.0, 100.0):
        monkeypatch.setattr("broker.queues.consumer_group.time", SimpleNamespace(monotonic=lambda now=now: now))
        assert alive.claim_stale(lease_s=50.0, count=10) == []
    assert deleted == [1]
    monkeypatch.undo()
    assert [item.message.task_id for item in alive.read(10, 10)] == [0]


@pytest.mark.parametrize("at_once", [False, True])
def test_a_server_that_is_replaced_just_after_it_was_given_a_script_gets_it_again(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    take_over(broker)
    client, given = broker.connection.client, []
    real = client.script_load

    def load(text: str) -> str:
        sha = real(text)
        if not given:
            client.script_flush()
        given.append(sha)
        return sha

    monkeypatch.setattr(client, "script_load", load)
    client.script_flush()
    if at_once:
        assert broker.ledger.admit_all([make_task(0), make_task(1)]).admitted == [0, 1]
    else:
        assert broker.ledger.read_state().balanced
    assert len(given) == 2


def test_waiting_for_scores_outlives_a_stream_that_vanishes_between_two_looks(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = take_over(broker)
    wipe(broker)
    monkeypatch.setattr(redis.Redis, "exists", lambda *_: 1)  # It was there a moment ago.
    training.wait_for_scores(timeout_ms=1)
    with pytest.raises(BrokerLost):  # What a trainer takes over again for, where "no such key" ended it.
        training.claim_scores(1)
