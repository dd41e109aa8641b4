"""Groups that failed before the broker forgot: nothing is requeued that is made again, or was trained."""

from __future__ import annotations

import pytest

from broker.client import Broker
from broker.flow.trainer_session import TrainerSession
from schemas.codec import encode
from schemas.messages import DeadLetter, Score
from tests.support.broker.broker_loss import checkpoint, train_one, training_lifetime
from tests.support.broker.prompt_groups import claim_batch, generate_and_score, make_task
from tests.support.broker.trainer_sessions import change_request, take_over, take_over_as

pytestmark = pytest.mark.integration


def fail_group(broker: Broker, training: TrainerSession, task_id: int) -> str:
    """A group that no generator can make: its dead letter."""
    client, keys = broker.connection.client, broker.connection.keys
    assert broker.ledger.admit(make_task(task_id)).answer == "ok"
    client.hset(keys.groups, f"{task_id}:entry", client.xadd(keys.tasks, {"t": task_id, "b": b"garbage"}))
    broker.task_queue("g").read(10, 10)
    assert training.read_pipeline().unfinished == set()
    return broker.dead_letters.list()[-1].id


@pytest.mark.parametrize("known", ["unfinished", "not yet admitted"])
def test_a_failed_group_that_a_mended_broker_makes_again_is_not_requeued_beside_that(
    broker: Broker, known: str
) -> None:
    training = take_over(broker)
    before = checkpoint(training)
    letter = fail_group(broker, training, 0)
    changes = {"cursor": 1, "unfinished": [0], "counts": {"admitted": 1}} if known == "unfinished" else {}
    assert take_over_as(broker, change_request(before, broker_lifetime="7-beef", **changes))[1].lost
    assert broker.dead_letters.requeue(letter) == ("waiting" if changes else "ended")
    assert broker.ledger.admit(make_task(0)).answer == "ok"
    train = take_over(broker, fresh=False, broker_lifetime=training_lifetime(broker))
    assert broker.dead_letters.requeue(letter) == "active"
    generate_and_score(broker, 0, (Score(reward=1.0), Score(reward=0.0)))
    record = claim_batch(train)
    train.journal_batch(record)
    train.complete_step(record)
    assert broker.dead_letters.requeue(letter) == "ended"
    assert broker.ledger.read_state().balanced


def test_a_group_whose_requeue_the_broker_forgot_is_not_requeued_again(broker: Broker) -> None:
    training = take_over(broker)
    letter = fail_group(broker, training, 0)
    failed = broker.connection.client.zrange(broker.connection.keys.failed, 0, -1)
    counted = broker.ledger.read_state().failed
    assert broker.dead_letters.requeue(letter) == "ok"
    train_one(broker, training, 0)
    saved = checkpoint(training)
    # The broker as it was before: the group is one that failed, and its letter is there.
    client, keys = broker.connection.client, broker.connection.keys
    client.zadd(keys.failed, {failed[0]: 1})
    client.hset(keys.counts, mapping={"failed:dead_letter": counted["dead_letter"], "failed:requeued": 0, "trained": 0})
    client.hset(keys.counts, "admitted", 1)
    client.hset(keys.ctl, "step", 0)
    again = client.xadd(
        keys.dead, {"b": encode(DeadLetter(source="tasks", reason="", deliveries=1, payload=b"", task_id=0))}
    )
    takeover = take_over_as(broker, saved)[1]
    assert (takeover.lost, takeover.surplus) == (True, 0)
    assert broker.dead_letters.requeue(again.decode()) == "ended"
    state = broker.ledger.read_state()
    assert (state.trained, state.dropped, sum(state.failed.values()), state.balanced) == (1, {}, 0, True)


def test_more_ends_than_groups_are_told_and_do_not_pass_for_something_else(broker: Broker) -> None:
    training = take_over(broker)
    train_one(broker, training, 0)
    _, takeover = take_over_as(broker, change_request(checkpoint(training), trained=2))
    assert takeover.surplus == 1
    assert broker.ledger.read_state().dropped == {"counted_twice": -1}
    assert broker.ledger.read_state().balanced, "the trainer can go on"


def test_a_group_that_failed_before_the_loss_is_still_requeued(broker: Broker) -> None:
    training = take_over(broker)
    letter = fail_group(broker, training, 0)
    assert take_over_as(broker, change_request(checkpoint(training), broker_lifetime="7-beef"))[1].lost
    assert broker.dead_letters.requeue(letter) == "ok"
    assert broker.ledger.admit(make_task(0)).answer == "ok"
    assert broker.ledger.read_state().balanced
