"""Work in batches has the same effect as one by one: admission, publishing, scoring and fetching."""

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.harness.workload import PipelineShape, TrajectoryPool, begin
from broker.client import Broker
from broker.connection.scripts import LuaScript
from broker.flow.pipeline import ScoredSample
from broker.flow.trainer_session import TrainerSession
from broker.queues.consumer_group import AT_ONCE, Delivery
from broker.queues.scores import outcomes_in
from broker.queues.tasks import eval_task_id
from schemas.codec import encode
from schemas.messages import Score, Trajectory
from tests.support.broker.prompt_groups import (
    count_entries,
    make_batch_record,
    make_task,
    make_trajectory,
    train_record,
)
from tests.support.broker.trainer_sessions import FIRST, change_request, take_over, take_over_as

POOL = TrajectoryPool(16)
GROUPS, SAMPLES = 20, 8
GOOD, BAD = Score(reward=1.0), Score(status="error", reason="no")


def fill(broker: Broker) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Admit and publish everything; returns the entries of the trajectories, in order."""
    begin(broker.trainer_session(), PipelineShape(batch=GROUPS, staleness=0))
    admission = broker.ledger.admit_all([POOL.task(task_id, SAMPLES) for task_id in range(GROUPS)])
    assert (admission.answer, admission.next) == ("ok", GROUPS)
    queue = broker.task_queue("g")
    results = [
        (item.message.task_id, [POOL.trajectory(item.message, s, 0) for s in range(SAMPLES)])
        for item in queue.read(GROUPS)
    ]
    assert queue.publish_all(results) == [["ok"] * SAMPLES] * GROUPS
    found: Any = broker.connection.client.xrange(broker.connection.keys.trajectories)
    return list(found)


def test_admission_stops_at_the_first_task_there_is_no_room_for(broker: Broker) -> None:
    begin(broker.trainer_session(), PipelineShape(batch=2, staleness=0))
    admission = broker.ledger.admit_all([POOL.task(task_id, 2) for task_id in range(4)])
    assert (admission.answer, admission.next) == ("full", 2)
    assert broker.ledger.admit_all([POOL.task(0, 2)]).next == 2
    assert broker.ledger.read_state().admitted == 2


def test_a_sample_twice_in_one_call_is_published_once(broker: Broker) -> None:
    begin(broker.trainer_session(), PipelineShape(batch=1, staleness=0))
    broker.ledger.admit(POOL.task(0, 2))
    (delivery,) = broker.task_queue("g").read(1)
    first, second = (POOL.trajectory(delivery.message, sample, 0) for sample in (0, 1))
    assert broker.task_queue("g").publish(0, [first, first, second]) == ["ok", "dup", "ok"]
    assert broker.connection.client.xlen(broker.connection.keys.trajectories) == 2
    assert broker.ledger.read_state().samples_published == 2
    assert broker.connection.client.xlen(broker.connection.keys.tasks) == 0


def test_one_call_admits_many_tasks_and_publishes_for_many(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, keys = list[str](), broker.connection.keys
    real = LuaScript.send

    def send(self: LuaScript, client: Any, args: Sequence[Any]) -> Any:
        calls.extend(
            name for name in ("admit_tasks", "publish_samples") if LuaScript.named(name, keys).text == self.text
        )
        return real(self, client, args)

    monkeypatch.setattr(LuaScript, "send", send)
    begin(broker.trainer_session(), PipelineShape(batch=AT_ONCE, staleness=0))
    broker.ledger.admit_all([POOL.task(task_id, 1) for task_id in range(AT_ONCE)])
    queue = broker.task_queue("g")
    tasks = [item.message for item in queue.read(AT_ONCE)]
    results = [(task.task_id, [POOL.trajectory(task, 0, 0)]) for task in tasks]
    assert queue.publish_all([*results[1:], (AT_ONCE, [POOL.trajectory(POOL.task(AT_ONCE, 1), 0, 0)])]) == [
        *[["ok"]] * (AT_ONCE - 1),
        ["closed"],
    ]
    assert queue.publish_all(results) == [["ok"], *[["dup"]] * (AT_ONCE - 1)]
    assert calls == ["admit_tasks", "publish_samples", "publish_samples"]
    assert broker.connection.client.hlen(keys.bodies) == AT_ONCE


def test_a_task_to_be_made_again_is_admitted_behind_one_that_is_not_next(broker: Broker) -> None:
    begin(broker.trainer_session(), PipelineShape(batch=4, staleness=0))
    broker.ledger.admit_all([POOL.task(task_id, 1) for task_id in range(3)])
    client, keys = broker.connection.client, broker.connection.keys
    client.zrem(keys.slots, "1")
    client.zadd(keys.readmit, {"1": 1})
    admission = broker.ledger.admit_all([POOL.task(0, 1), POOL.task(1, 1), POOL.task(3, 1)])
    assert (admission.answer, admission.next, admission.admitted) == ("moved", 4, [1, 3])


def test_more_scores_than_fit_one_call_are_each_published_once(broker: Broker) -> None:
    count = len(fill(broker))
    assert count > 2 * AT_ONCE
    queue = broker.score_queue("r")
    results = [(item, Score(reward=1.0)) for item in queue.read(count)]
    assert queue.publish([*results, results[0]]) == ["ok"] * count + ["dup"]
    assert queue.publish(results) == ["dup"] * count
    entries: Any = broker.connection.client.xrange(broker.connection.keys.scored)
    found = [(int(fields[b"t"]), sample) for _, fields in entries for sample, _, _ in outcomes_in(fields)]
    assert found == [(task, sample) for task in range(GROUPS) for sample in range(SAMPLES)]
    assert len(entries) == GROUPS
    assert broker.connection.client.xpending(broker.connection.keys.trajectories, "reward")["pending"] == 0


def test_no_call_of_a_script_holds_more_bytes_than_it_may(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 3 * len(encode(POOL.trajectory(POOL.task(0, SAMPLES), 0, 0)))
    monkeypatch.setattr("broker.queues.consumer_group.BYTES_AT_ONCE", most)
    monkeypatch.setattr("broker.queues.tasks.PARCEL_BYTES", most)
    real, sent = broker.connection.run_scripts, dict[str, list[list[int]]]()

    def run_scripts(name: str, calls: Sequence[Sequence[Any]]) -> list[Any]:
        sent[name] = [[len(item) for item in call if isinstance(item, bytes)] for call in calls]
        return real(name, calls)

    def run_script_with_fields(name: str, key: str, calls: Sequence[tuple[Sequence[Any], Sequence[Any]]]) -> list[Any]:
        sent[name] = [[len(item) for item in fields if isinstance(item, bytes)] for fields, _ in calls]
        return with_fields(name, key, calls)

    with_fields = broker.connection.run_script_with_fields
    monkeypatch.setattr(broker.connection, "run_scripts", run_scripts)
    monkeypatch.setattr(broker.connection, "run_script_with_fields", run_script_with_fields)
    fill(broker)
    failed = Score(status="error", reason="no")
    queue = broker.score_queue("r")
    assert queue.publish([(item, failed) for item in queue.read(GROUPS * SAMPLES)]) == ["ok"] * GROUPS * SAMPLES
    for name in ("publish_samples", "publish_scores"):
        assert len(sent[name]) > GROUPS
        assert max(map(sum, sent[name])) <= most
    assert broker.ledger.read_state().dead_letters == GROUPS * SAMPLES


def test_trajectories_are_fetched_in_the_order_asked_for(broker: Broker) -> None:
    entries = fill(broker)
    client, keys = broker.connection.client, broker.connection.keys
    places = [entry + b"/" + fields[b"b"] for entry, fields in entries]
    asked = [places[9], b"5-0/nothing.0", b"", places[3], *places[100:140], places[4], places[3]]
    client.hdel(keys.bodies, entries[110][1][b"b"].decode())
    found = broker.trainer_session().fetch_trajectories(asked)
    gone = (b"5-0/nothing.0", b"", places[110])
    wanted = [None if place in gone else divmod(places.index(place), SAMPLES) for place in asked]
    assert [(body.task_id, body.sample) if isinstance(body, Trajectory) else body for body in found] == wanted
    assert broker.trainer_session().fetch_trajectories([]) == []


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
    train_record(training, make_batch_record(outcomes, 0), commit=True)


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
