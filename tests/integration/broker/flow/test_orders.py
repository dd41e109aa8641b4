"""Who is woken by what: generators by orders alone, whoever waits for room by everything."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from broker.client import Broker
from broker.flow.progress import Progress
from schemas.errors import BrokerLost
from schemas.messages import Score
from tests.support.broker.prompt_groups import claim_batch, generate_and_score, make_task
from tests.support.broker.trainer_sessions import FIRST, take_over, take_over_as

pytestmark = pytest.mark.integration


def test_groups_that_come_and_go_wake_no_generator(broker: Broker) -> None:
    training = take_over(broker)
    orders, changes = broker.run_control.order_position(), broker.ledger.change_position()
    for task_id in range(2):
        broker.ledger.admit(make_task(task_id))
        generate_and_score(broker, task_id, (Score(reward=1.0), Score(reward=1.0)))
    outcomes = training.claim_scores(2)
    assert training.drop_group(0, "zero_variance", [outcome.scored_id for outcome in outcomes])
    record = claim_batch(training)
    training.journal_batch(record)
    training.complete_step(record)
    assert broker.ledger.change_position() != changes
    assert broker.run_control.order_position() == orders


@pytest.mark.parametrize("order", ["pause", "resume", "concurrency", "take-over"])
def test_an_order_wakes_generators_and_whoever_waits_for_room(broker: Broker, order: str) -> None:
    take_over(broker)
    broker.run_control.pause("drain", "t")
    orders, changes = broker.run_control.order_position(), broker.ledger.change_position()
    waiting = [
        threading.Thread(target=broker.run_control.wait_order, args=(orders, 9_000)),
        threading.Thread(target=broker.ledger.wait_change, args=(changes, 9_000)),
    ]
    for thread in waiting:
        thread.start()
    if order == "concurrency":
        broker.ledger.change_settings({"concurrency": 3})
    elif order == "take-over":
        take_over(broker, fresh=False)
    else:
        broker.run_control.pause("freeze" if order == "pause" else "none", "t")
    for thread in waiting:
        thread.join(5)
        assert not thread.is_alive()


def test_the_trainer_notices_when_nobody_can_wait_for_orders(broker: Broker) -> None:
    training = take_over(broker)
    broker.connection.authority = True
    broker.connection.client.set(broker.connection.keys.orders, "hello")
    with pytest.raises(BrokerLost, match="replaced"):
        training.read_pipeline()
    take_over(broker, fresh=False).read_pipeline()
    assert broker.run_control.order_position() != b"0-0"


def test_the_trainer_notices_that_orders_are_gone_and_gives_them_again(broker: Broker) -> None:
    training, known = take_over(broker), Progress()
    broker.run_control.pause("freeze", "ada")
    known.update(training.read_pipeline())
    broker.connection.client.delete(broker.connection.keys.run_control)
    broker.run_control.checkpoint("bob")
    with pytest.raises(BrokerLost, match="lost the orders"):
        training.read_pipeline()
    again, takeover = take_over_as(broker, replace(FIRST, fresh=False, progress=known))
    assert not takeover.lost, "orders are no part of the pipeline"
    control = again.read_pipeline().control
    assert (control.pause, control.pause_id, control.by) == ("freeze", 1, "ada")
    assert broker.run_control.pause("none", "ada")
    assert not broker.ledger.read_state().paused
