"""Scores of a group that come together travel as one entry, and each sample counts as if it were alone."""

from __future__ import annotations

import pytest

from broker.client import Broker
from broker.flow.pipeline import ScoredSample
from broker.flow.trainer_session import TrainerSession
from broker.queues.consumer_group import Delivery
from broker.queues.tasks import eval_task_id
from schemas.messages import Score, Trajectory
from tests.support.broker.prompt_groups import count_entries, make_batch_record, make_task, make_trajectory
from tests.support.broker.trainer_sessions import FIRST, change_request, take_over, take_over_as

pytestmark = pytest.mark.integration

GOOD, BAD = Score(reward=1.0), Score(status="error", reason="no")


def generate(broker: Broker, *sizes: int) -> list[Delivery[Trajectory]]:
    """Tasks 0, 1, ... of so many samples; returns the deliveries to a reward service, task by task."""
    queue = broker.task_queue("g")
    for task, n in enumerate(sizes):
        assert broker.ledger.admit(make_task(task, n=n)).answer == "ok"
        assert queue.publish(task, [make_trajectory(task, i) for i in range(n)]) == ["ok"] * n
    return broker.score_queue("r").read(100, 10)


def names(outcomes: list[ScoredSample]) -> list[tuple[int, int]]:
    return [(outcome.task_id, outcome.sample) for outcome in outcomes]


def entries_and_pending(broker: Broker) -> tuple[int, int]:
    client, key = broker.connection.client, broker.connection.keys.scored
    return int(client.xlen(key)), int(client.xpending(key, "trainer")["pending"])


def train(training: TrainerSession, outcomes: list[ScoredSample]) -> None:
    record = make_batch_record(outcomes, 0)
    training.journal_batch(record)
    training.complete_step(record)
    training.commit_steps([record])


def test_an_entry_ends_with_its_group_and_no_other(broker: Broker) -> None:
    training = take_over(broker)
    one, two, three, other, another = generate(broker, 3, 2)
    mixed = [(item, GOOD) for item in (two, other, one, another, three)]
    assert broker.score_queue("r").publish(mixed) == ["ok"] * 5
    outcomes = training.claim_scores(10)
    assert names(outcomes) == [(0, 1), (0, 0), (0, 2), (1, 0), (1, 1)]
    assert len({outcome.scored_id for outcome in outcomes}) == 5
    assert entries_and_pending(broker) == (2, 2)
    assert training.drop_group(1, "zero_variance", [outcome.scored_id for outcome in outcomes[3:]])
    assert entries_and_pending(broker) == (1, 1)
    train(training, outcomes[:3])
    assert entries_and_pending(broker) == (0, 0)
    assert set(count_entries(broker).values()) == {0}


def test_a_group_in_several_entries_is_trained_once(broker: Broker) -> None:
    training = take_over(broker)
    deliveries = generate(broker, 5)
    rewards = broker.score_queue("r")
    assert rewards.publish([(item, GOOD) for item in deliveries[:2]]) == ["ok", "ok"]
    # Sent again with what is new, as after a lost answer.
    assert rewards.publish([(item, GOOD) for item in deliveries[1:4]]) == ["dup", "ok", "ok"]
    assert rewards.publish([(deliveries[4], GOOD)]) == ["ok"]
    outcomes = training.claim_scores(10)
    assert names(outcomes) == [(0, sample) for sample in range(5)]
    assert {outcome.group_size for outcome in outcomes} == {5}
    assert entries_and_pending(broker) == (3, 3)
    train(training, outcomes)
    assert entries_and_pending(broker) == (0, 0)
    state = broker.ledger.read_state()
    assert (state.samples_trained, state.balanced) == (5, True)


def test_a_successor_finds_each_sample_of_an_entry_under_its_name_in_the_journal(broker: Broker) -> None:
    first = take_over(broker)
    assert broker.score_queue("r").publish([(item, GOOD) for item in generate(broker, 3, 1)]) == ["ok"] * 4
    record = make_batch_record(first.claim_scores(10), 0)
    first.journal_batch(record)
    second, _ = take_over_as(broker, change_request(FIRST, step=0))
    found = {outcome.scored_id: outcome for outcome in second.claim_scores(10)}
    (journaled,) = second.read_journal().values()
    members = [(group.task_id, member) for group in journaled.groups for member in group.members]
    assert len(members) == len(found) == 4
    for task_id, member in members:
        outcome = found[member.scored_id]
        assert (outcome.task_id, outcome.sample) == (task_id, member.sample)
        assert outcome.trajectory_id == member.trajectory_id


def test_a_failed_reward_in_an_entry_excludes_its_sample_only(broker: Broker) -> None:
    training = take_over(broker)
    deliveries = generate(broker, 3)
    scores = [GOOD, BAD, GOOD]
    assert broker.score_queue("r").publish(list(zip(deliveries, scores, strict=True))) == ["ok"] * 3
    outcomes = training.claim_scores(10)
    assert [outcome.excluded for outcome in outcomes] == [False, True, False]
    assert [outcome.trajectory_id is None for outcome in outcomes] == [False, True, False]
    assert broker.ledger.read_state().dead_letters == 1
    assert entries_and_pending(broker) == (1, 1)


def test_scores_of_training_and_evaluation_come_in_one_call(broker: Broker) -> None:
    training = take_over(broker)
    number = eval_task_id(0, 0)
    assert broker.evals.open(0, [make_task(number, n=3, kind="eval")])
    broker.task_queue("g").publish(number, [make_trajectory(number, i, kind="eval") for i in range(3)])
    deliveries = generate(broker, 2)
    assert [item.message.kind for item in deliveries] == ["eval"] * 3 + ["train"] * 2
    scores = [Score(reward=0.25, correct=True), BAD, Score(reward=1e-7), GOOD, GOOD]
    results = list(zip(deliveries, scores, strict=True))
    assert broker.score_queue("r").publish([results[3], *results[:3], results[4]]) == ["ok"] * 5
    assert names(training.claim_scores(10)) == [(0, 0), (0, 1)]
    (result,) = broker.evals.read_results()
    assert (result.scored, result.failed, result.complete) == (2, 1, True)
    assert [of.prompts for of in result.datasets.values()] == [{(2, 1): 1}]
    assert result.mean == pytest.approx((0.25 + 1e-7) / 2)
    assert result.length == 1.0


def test_outcomes_of_a_group_that_ended_go_with_their_entry(broker: Broker) -> None:
    training = take_over(broker)
    deliveries = generate(broker, 3)
    rewards = broker.score_queue("r")
    rewards.publish([(item, GOOD) for item in deliveries])
    outcomes = training.claim_scores(10)
    training.discard_scores(outcomes)
    assert entries_and_pending(broker) == (0, 0)
    assert broker.ledger.read_state().dead_letters == 0
