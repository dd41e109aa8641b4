"""Bodies of samples lie beside the stream: each is there exactly as long as its sample, whatever happens."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from broker.client import Broker
from broker.connection.keys import REWARD
from broker.queues.tasks import eval_task_id
from schemas.codec import BadMessage, encode
from schemas.errors import BrokerDamaged, InfraError
from schemas.messages import Score, Trajectory
from tests.support.broker.one_group import take_over
from tests.support.broker.prompt_groups import generate_and_score, make_task, make_trajectory

pytestmark = pytest.mark.integration


def count_bodies(broker: Broker) -> int:
    count: Any = broker.connection.client.hlen(broker.connection.keys.bodies)
    return int(count)


def test_a_second_delivery_neither_replaces_a_body_nor_leaves_one(broker: Broker) -> None:
    training = take_over(broker)
    broker.ledger.admit(make_task(0))
    first, second = broker.task_queue("g"), broker.task_queue("h")
    assert first.publish(0, [make_trajectory(0, 0)]) == ["ok"]
    assert second.publish(0, [make_trajectory(0, 0, version=7), make_trajectory(0, 1)]) == ["dup", "ok"]
    assert count_bodies(broker) == 2
    rewards = broker.score_queue("r")
    rewards.publish([(item, Score(reward=1.0)) for item in rewards.read(10, 10)])
    bodies = training.fetch_trajectories([item.trajectory_id or b"" for item in training.claim_scores(10)])
    assert [body.oldest_version for body in bodies if isinstance(body, Trajectory)] == [0, 0]


def test_a_delivery_whose_answer_was_lost_is_repeated_without_harm(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_over(broker)
    broker.ledger.admit(make_task(0))
    real, calls = broker.connection._evaluate_with_fields, list[object]()

    def lose_the_first_answer(*args: Any) -> Any:
        answer = real(*args)
        calls.append(answer)
        if len(calls) == 1:
            raise redis.ConnectionError("lost")
        return answer

    monkeypatch.setattr(broker.connection, "_evaluate_with_fields", lose_the_first_answer)
    assert broker.task_queue("g").publish(0, [make_trajectory(0, 0)]) == ["dup"]
    assert count_bodies(broker) == 1
    assert [item.message.sample for item in broker.score_queue("r").read(10, 10)] == [0]


def test_what_comes_for_a_group_that_ended_leaves_no_body(broker: Broker) -> None:
    training = take_over(broker)
    broker.ledger.admit(make_task(0))
    generate_and_score(broker, 0, (Score(reward=1.0), Score(reward=1.0)))
    assert count_bodies(broker) == 2
    training.drop_group(0, "zero_variance", [outcome.scored_id for outcome in training.claim_scores(10)])
    assert count_bodies(broker) == 0
    assert broker.task_queue("g").publish(0, [make_trajectory(0, 0)]) == ["closed"]
    assert count_bodies(broker) == 0


def test_a_scored_sample_of_an_evaluation_leaves_no_body(broker: Broker) -> None:
    take_over(broker)
    task = make_task(eval_task_id(0, 0), n=2, kind="eval")
    broker.evals.open(0, [task])
    broker.task_queue("g").publish(task.task_id, [make_trajectory(task.task_id, i, kind="eval") for i in (0, 1)])
    rewards = broker.score_queue("r")
    one, other = rewards.read(10, 10)
    rewards.publish([(one, Score(reward=1.0))])
    assert count_bodies(broker) == 1
    rewards.publish([(other, Score(reward=1.0))])
    assert count_bodies(broker) == 0


def test_a_sample_is_noted_only_with_its_body(broker: Broker) -> None:
    """A key of another type stands for every refusal of the body: the sample waits for the trainer to mend it."""
    take_over(broker)
    broker.ledger.admit(make_task(0))
    client, keys = broker.connection.client, broker.connection.keys
    client.set(keys.bodies, "hello")
    broker.connection.deadline_s = 0.1
    with pytest.raises(InfraError, match="WRONGTYPE"):
        broker.task_queue("g").publish(0, [make_trajectory(0, 0)])
    assert (client.xlen(keys.trajectories), client.hlen(keys.samples)) == (0, 0)
    client.delete(keys.bodies)
    assert broker.task_queue("g").publish(0, [make_trajectory(0, 0)]) == ["ok"]


def test_a_full_server_takes_neither_body_nor_sample(broker: Broker) -> None:
    take_over(broker)
    broker.ledger.admit(make_task(0))
    client, keys = broker.connection.client, broker.connection.keys
    broker.connection.deadline_s = 0.1
    client.config_set("maxmemory", "1mb")
    try:
        with pytest.raises(InfraError, match="memory"):
            broker.task_queue("g").publish(0, [make_trajectory(0, 0)])
    finally:
        client.config_set("maxmemory", "0")
    assert (count_bodies(broker), client.hlen(keys.samples)) == (0, 0)


def test_a_lost_body_is_found_by_the_trainer_and_is_no_fault_of_the_reward_service(broker: Broker) -> None:
    training = take_over(broker)
    broker.ledger.admit(make_task(0))
    broker.task_queue("g").publish(0, [make_trajectory(0, 0), make_trajectory(0, 1)])
    client, keys = broker.connection.client, broker.connection.keys
    client.delete(keys.bodies)
    assert broker.score_queue("r").read(10, 10) == []
    assert client.xlen(keys.dead) == 0
    with pytest.raises(BrokerDamaged):
        training.diagnose_group(0)


def test_a_sample_of_an_evaluation_that_lost_its_body_counts_as_failed(broker: Broker) -> None:
    """No trainer looks for it, and an evaluation ends with its last sample."""
    take_over(broker)
    task = make_task(eval_task_id(0, 0), n=2, kind="eval")
    broker.evals.open(0, [task])
    broker.task_queue("g").publish(task.task_id, [make_trajectory(task.task_id, i, kind="eval") for i in (0, 1)])
    client, keys = broker.connection.client, broker.connection.keys
    (_, first), _ = client.xrange(keys.trajectories)
    client.hdel(keys.bodies, first[b"b"])
    rewards = broker.score_queue("r")
    (found,) = rewards.read(10, 10)
    assert (found.message.task_id, found.message.sample) == (task.task_id, 1)
    (filed,) = broker.dead_letters.list()
    assert (filed.letter.task_id, filed.letter.sample) == (task.task_id, 0)
    assert filed.letter.reason == "its body is not there"
    rewards.publish([(found, Score(reward=1.0))])
    (result,) = broker.evals.read_results()
    assert (result.complete, result.scored, result.failed, result.mean) == (True, 1, 1, 1.0)
    assert client.xpending(keys.trajectories, REWARD)["pending"] == 0
    assert (client.xlen(keys.trajectories), client.hlen(keys.samples), count_bodies(broker)) == (0, 0, 0)


def test_who_comes_late_to_a_sample_of_an_evaluation_that_is_scored_changes_nothing(broker: Broker) -> None:
    """Its body went with its score while another reward service held its entry."""
    take_over(broker)
    task = make_task(eval_task_id(0, 0), n=2, kind="eval")
    broker.evals.open(0, [task])
    broker.task_queue("g").publish(task.task_id, [make_trajectory(task.task_id, i, kind="eval") for i in (0, 1)])
    late = broker.score_queue("late")
    fetched = late._read(1, 10)
    on_time = broker.score_queue("on time")
    on_time.publish([(item, Score(reward=1.0)) for item in on_time.claim_stale(0.0, 10)])
    assert late._decode(fetched) == []
    (result,) = broker.evals.read_results()
    assert (result.scored, result.failed) == (1, 0)
    assert broker.connection.client.xlen(broker.connection.keys.dead) == 0


def test_arrays_that_contradict_one_another_are_scored_but_not_trained(broker: Broker) -> None:
    training = take_over(broker)
    broker.ledger.admit(make_task(0))
    broker.task_queue("g").publish(0, [make_trajectory(0, 0), make_trajectory(0, 1)])
    client, keys = broker.connection.client, broker.connection.keys
    (_, first), _ = client.xrange(keys.trajectories)
    whole = encode(make_trajectory(0, 0))
    assert whole.count(b"\x01\x00\x00\x00\x02") == 1
    client.hset(keys.bodies, first[b"b"], whole.replace(b"\x01\x00\x00\x00\x02", b"\xff\xff\xff\xff\x02"))
    rewards = broker.score_queue("r")
    found = rewards.read(10, 10)
    assert [item.message.completion for item in found] == ["2", "2"]
    rewards.publish([(item, Score(reward=1.0)) for item in found])
    bodies = training.fetch_trajectories([item.trajectory_id or b"" for item in training.claim_scores(10)])
    assert [type(body) for body in bodies] == [BadMessage, Trajectory]
    assert "tokens must be 0 or more" in str(bodies[0])
