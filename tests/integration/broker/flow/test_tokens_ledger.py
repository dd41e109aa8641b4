"""Each generated token ends as exactly one thing, whatever happens to its group and to the broker."""

from broker.client import Broker
from schemas.messages import Score
from tests.support.broker.prompt_groups import (
    generate_and_score,
    make_batch_record,
    make_task,
    make_trajectory,
    train_record,
)
from tests.support.broker.trainer_sessions import take_over


def in_pipeline(broker: Broker) -> int:
    """Tokens of published samples of groups that hold a slot, one for each sample here."""
    return broker.ledger.count_live_samples()


def test_tokens_end_as_their_group_does(broker: Broker) -> None:
    training = take_over(broker)
    for task_id in range(4):
        broker.ledger.admit(make_task(task_id))
        generate_and_score(broker, task_id, (Score(reward=1.0), Score(reward=0.0)))
    outcomes = training.claim_scores(100)
    training.drop_group(1, "stale", [one.scored_id for one in outcomes if one.task_id == 1])
    training.drop_group(1, "stale", [one.scored_id for one in outcomes if one.task_id == 1])
    training.drop_group(2, "no_reward", [one.scored_id for one in outcomes if one.task_id == 2], "failed")
    record = train_record(training, make_batch_record([one for one in outcomes if one.task_id == 0], 0))
    training.complete_step(record)
    state = broker.ledger.read_state()
    assert state.tokens == {"trained": 2, "stale": 2, "no_reward": 2}
    assert (state.tokens_generated, state.tokens_in_flight, in_pipeline(broker)) == (8, 2, 2)
    training.commit_steps([record])
    assert broker.ledger.read_state().tokens_in_flight == 2


def test_tokens_of_a_group_that_no_generator_survives_end_with_it(broker: Broker) -> None:
    take_over(broker)
    broker.ledger.admit(make_task(0))
    queue = broker.task_queue("g")
    (delivery,) = queue.read(10, 10)
    assert queue.publish(0, [make_trajectory(0, 0)]) == ["ok"]
    for _ in range(2):
        broker.connection.run_script("fail_task", "tasks", delivery.entry_id, 0, b"letter")
    state = broker.ledger.read_state()
    assert (state.tokens_generated, state.tokens, state.tokens_in_flight) == (1, {"dead_letter": 1}, 0)


def test_a_sample_that_two_generators_made_counts_once_and_once_as_made_again(broker: Broker) -> None:
    take_over(broker)
    broker.ledger.admit(make_task(0))
    first, second = broker.task_queue("g"), broker.task_queue("h")
    first.read(10, 10)
    samples = [make_trajectory(0, sample) for sample in range(2)]
    assert first.publish(0, samples) == ["ok", "ok"]
    assert second.publish(0, samples[:1]) == ["dup"]
    state = broker.ledger.read_state()
    assert (state.tokens_generated, state.tokens, state.tokens_in_flight) == (3, {"made_again": 1}, 2)


def test_tokens_that_the_broker_lost_are_made_again(broker: Broker) -> None:
    training = take_over(broker)
    for task_id in range(2):
        broker.ledger.admit(make_task(task_id))
        generate_and_score(broker, task_id, (Score(reward=1.0), Score(reward=0.0)))
    train_record(training, make_batch_record([one for one in training.claim_scores(100) if one.task_id == 0], 0))
    counts = training.read_pipeline().counts
    broker.connection.client.delete(broker.connection.keys.groups)
    take_over(broker, step=1, trained=1, cursor=2, unfinished={1}, counts=counts, fresh=False)
    state = broker.ledger.read_state()
    assert state.tokens == {"trained": 2, "made_again": 2}
    assert (state.tokens_generated, state.tokens_in_flight, in_pipeline(broker)) == (4, 0, 0)
