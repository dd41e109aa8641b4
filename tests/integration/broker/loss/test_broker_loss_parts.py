"""A broker that lost a part: its last writes, streams, leases, scripts or weights."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from broker.client import Broker
from broker.connection.connection import Connection
from broker.connection.embedded import EmbeddedServer
from broker.connection.keys import Keys
from schemas.config import BrokerConfig
from schemas.errors import BrokerLost
from schemas.messages import Score
from tests.support.broker.broker_loss import checkpoint, train_one, wipe
from tests.support.broker.one_group import fetch_weights, publish_weights
from tests.support.broker.prompt_groups import (
    claim_batch,
    generate_and_score,
    make_batch_record,
    make_task,
    make_trajectory,
    train_record,
)
from tests.support.broker.trainer_sessions import change_request, take_over, take_over_as


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path / "b", fsync="always") as server:
        yield server


@pytest.fixture
def connect(own_server: EmbeddedServer) -> Callable[[], Broker]:
    def make() -> Broker:
        config = BrokerConfig()
        return Broker(Connection(own_server.url, Keys(config.prefix, "cut"), 20.0), config)

    return make


def restart_with(server: EmbeddedServer, size: int) -> None:
    """Kill the server, and start it with the append-only file it had when it was ``size`` bytes long."""
    assert server.process is not None
    server.process.kill()
    part = newest_part(server)
    with part.open("r+b") as file:
        file.truncate(size)
    server.start()


def newest_part(server: EmbeddedServer) -> Path:
    return max((server.folder / "appendonlydir").glob("*.incr.aof"), key=lambda file: file.stat().st_mtime)


def test_a_second_of_lost_writes_is_made_again_and_what_was_trained_is_not(
    own_server: EmbeddedServer, connect: Callable[[], Broker]
) -> None:
    broker = connect()
    training = take_over(broker)
    broker.ledger.admit(make_task(0))
    generate_and_score(broker, 0, (Score(reward=1.0), Score(reward=0.0)))
    size = newest_part(own_server).stat().st_size
    train_record(training, claim_batch(training))
    for task_id in (1, 2):
        broker.ledger.admit(make_task(task_id))
    saved = checkpoint(training)
    restart_with(own_server, size)
    with pytest.raises(BrokerLost, match="restarted"):
        training.read_pipeline()
    _, takeover = take_over_as(broker, saved)
    assert takeover.lost
    state = broker.ledger.read_state()
    assert (state.step, state.trained, state.active, state.readmit, state.cursor) == (1, 1, 0, 2, 3)
    assert state.balanced
    assert broker.connection.client.xlen(broker.connection.keys.trajectories) == 0, "what was trained is gone"
    assert broker.ledger.admit(make_task(1)).answer == "ok"


def test_a_step_after_a_lost_one_is_refused_and_what_was_trained_does_not_come_back(
    own_server: EmbeddedServer, connect: Callable[[], Broker]
) -> None:
    broker = connect()
    training = take_over(broker)
    for task_id in (0, 1):
        assert broker.ledger.admit(make_task(task_id)).answer == "ok"
        generate_and_score(broker, task_id, (Score(reward=1.0), Score(reward=0.0)))
    outcomes = training.claim_scores(100)
    records = [
        make_batch_record([outcome for outcome in outcomes if outcome.task_id == task_id], step=task_id)
        for task_id in (0, 1)
    ]
    training.journal_batch(records[0])
    size = newest_part(own_server).stat().st_size
    training.complete_step(records[0])
    training.journal_batch(records[1])
    saved = change_request(
        checkpoint(training), unfinished=set(), step=2, saved=0, version=2, version_if_lost=2, trained=2
    )
    restart_with(own_server, size)
    with pytest.raises(BrokerLost):
        training.journal_batch(records[1])
    with pytest.raises(BrokerLost):
        training.complete_step(records[1])
    assert broker.ledger.read_state().step == 0
    assert take_over_as(broker, saved)[1].lost
    state = broker.ledger.read_state()
    assert (state.step, state.trained, state.active, state.readmit, state.balanced) == (2, 2, 0, 0, True)


def test_a_restart_that_lost_nothing_is_no_loss(own_server: EmbeddedServer, connect: Callable[[], Broker]) -> None:
    broker = connect()
    training = take_over(broker)
    train_one(broker, training, 0)
    broker.ledger.admit(make_task(1))
    saved = checkpoint(training)
    restart_with(own_server, newest_part(own_server).stat().st_size)
    with pytest.raises(BrokerLost):
        training.read_pipeline()
    new, takeover = take_over_as(broker, saved)
    assert not takeover.lost
    assert new.read_pipeline().unfinished == {1}
    assert broker.ledger.read_state().balanced


def test_a_score_for_a_broker_that_was_wiped_changes_nothing(broker: Broker) -> None:
    take_over(broker)
    assert broker.ledger.admit(make_task(0)).answer == "ok"
    broker.task_queue("g").publish(0, [make_trajectory(0, i) for i in range(2)])
    rewards = broker.score_queue("r")
    results = rewards.read(10, 10)
    wipe(broker)
    assert rewards.publish([(item, Score(reward=1.0)) for item in results]) == ["dup", "dup"]


@pytest.mark.parametrize("stream", ["tasks", "trajectories", "scored"])
def test_a_deleted_group_or_stream_group_is_made_again_and_trained_once(broker: Broker, stream: str) -> None:
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


def test_a_group_deleted_as_leases_are_dated_is_made_again(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_wait_for_scores_outlives_a_vanished_stream(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    training = take_over(broker)
    wipe(broker)
    monkeypatch.setattr(redis.Redis, "exists", lambda *_: 1)  # It was there a moment ago.
    training.wait_for_scores(timeout_ms=1)
    with pytest.raises(BrokerLost):  # What a trainer takes over again for, where "no such key" ended it.
        training.claim_scores(1)


@pytest.mark.parametrize("name", ["weights", "chunks"])
def test_weights_replace_a_foreign_value_in_their_key(broker: Broker, tmp_path: Path, name: str) -> None:
    training = take_over(broker)
    broker.connection.authority = True
    publish_weights(broker, training.leader_term, 1, tmp_path)
    broker.connection.client.set(getattr(broker.connection.keys, name), "hello")
    with pytest.raises(BrokerLost, match="replaced"):
        publish_weights(broker, training.leader_term, 2, tmp_path)
    successor = take_over(broker, fresh=False)
    for version in (1, 2):
        publish_weights(broker, successor.leader_term, version, tmp_path)
    assert fetch_weights(broker, tmp_path).version == 2


@pytest.mark.parametrize("kind", ["redis", "file"])
def test_bytes_of_a_published_version_that_are_gone_are_put_back(broker: Broker, tmp_path: Path, kind: str) -> None:
    training = take_over(broker)
    publish_weights(broker, training.leader_term, 1, tmp_path, kind=kind)
    manifest = broker.weights.newest()
    assert manifest is not None
    broker.connection.client.delete(broker.connection.keys.chunks)
    (tmp_path / "v1-t1.safetensors").unlink(missing_ok=True)
    assert not broker.weights.holds(manifest)
    successor = take_over(broker, fresh=False)
    publish_weights(broker, successor.leader_term, 1, tmp_path, kind=kind)
    assert broker.weights.holds(manifest)
    assert fetch_weights(broker, tmp_path) == manifest


def test_a_version_is_not_given_other_bytes_than_it_had(broker: Broker, tmp_path: Path) -> None:
    training = take_over(broker)
    publish_weights(broker, training.leader_term, 1, tmp_path)
    broker.connection.client.delete(broker.connection.keys.chunks)
    publish_weights(broker, training.leader_term, 1, tmp_path, content=b"other")
    assert not broker.connection.client.exists(broker.connection.keys.chunks)


def test_a_stream_of_weights_that_is_deleted_while_a_version_is_published_is_no_error(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = take_over(broker)
    real = broker.connection.run_script

    def script(name: str, *args: Any, **options: Any) -> Any:
        answer = real(name, *args, **options)
        if name == "add_version":
            broker.connection.client.delete(broker.connection.keys.weights)
        return answer

    monkeypatch.setattr(broker.connection, "run_script", script)
    publish_weights(broker, training.leader_term, 1, tmp_path)
    assert broker.weights.newest() is None


def test_chunks_that_no_manifest_names_are_freed_with_the_next_version(broker: Broker, tmp_path: Path) -> None:
    training = take_over(broker)
    client, keys = broker.connection.client, broker.connection.keys
    for version in (1, 2):
        publish_weights(broker, training.leader_term, version, tmp_path, keep=2)
    client.hset(keys.chunks, "0:0", b"of a trainer that died before its manifest")
    client.hset(keys.chunks, "9:0", b"of a version on its way")
    client.hset(keys.chunks, "hello", b"world")
    client.xdel(keys.weights, "1-1")
    publish_weights(broker, training.leader_term, 3, tmp_path, keep=2)
    assert set(client.hkeys(keys.chunks)) == {b"2:0", b"3:0", b"9:0"}
