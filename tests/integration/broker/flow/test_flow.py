"""One group through every hop of a real server, every way a group can end, and the bound of what is live."""

from collections.abc import Callable
from typing import Any

import pytest

from broker.client import Broker
from broker.evaluations import store
from broker.flow.pipeline import ScoredSample
from broker.queues.tasks import eval_task_id
from schemas.errors import FencedError
from schemas.messages import BatchRecord, Score
from tests.support.broker.prompt_groups import (
    claim_batch,
    count_entries,
    generate_and_score,
    make_batch_record,
    make_task,
    make_trajectory,
    train_record,
)
from tests.support.broker.trainer_sessions import take_over
from tools.soak import length_bounds

BATCH, STALENESS, UNCOMMITTED, SAMPLES = 2, 1, 3, 2


def test_a_group_is_trained_and_leaves_nothing_behind(broker: Broker) -> None:
    training = take_over(broker)
    assert broker.ledger.admit(make_task(0)).answer == "ok"
    generate_and_score(broker, 0, (Score(reward=1.0), Score(reward=0.0)))
    record = claim_batch(training)
    assert [member.sample for member in record.groups[0].members] == [0, 1]
    bodies = training.fetch_trajectories([member.trajectory_id for member in record.groups[0].members])
    assert [body.completion for body in bodies if body] == ["2", "2"]
    training.journal_batch(record)
    training.complete_step(record)
    state = broker.ledger.read_state()
    assert (state.step, state.version, state.active, state.trained, state.samples_trained) == (1, 1, 0, 1, 2)
    assert state.balanced
    training.commit_steps([record])
    assert set(count_entries(broker).values()) == {0}


def test_admission_stops_at_the_slots_and_goes_on_after_a_step(broker: Broker) -> None:
    training = take_over(broker, staleness=1)
    assert [broker.ledger.admit(make_task(i)).answer for i in range(3)] == ["ok", "ok", "full"]
    run_group_ids = [0, 1]
    queue = broker.task_queue("g")
    for delivery in queue.read(10, 10):
        queue.publish(delivery.message.task_id, [make_trajectory(delivery.message.task_id, i) for i in range(2)])
    rewards = broker.score_queue("r")
    rewards.publish([(item, Score(reward=1.0)) for item in rewards.read(10, 10)])
    record = claim_batch(training)
    assert [group.task_id for group in record.groups] == run_group_ids
    training.journal_batch(record)
    training.complete_step(record)
    assert broker.ledger.admit(make_task(2)).answer == "ok"


def test_admission_repeats_harmlessly_and_ends_at_the_total(broker: Broker) -> None:
    take_over(broker, steps=1)
    assert broker.ledger.admit(make_task(0)).answer == "ok"
    again = broker.ledger.admit(make_task(0))
    assert (again.answer, again.next) == ("moved", 1)
    assert broker.ledger.admit(make_task(1)).answer == "done"


def test_nothing_is_admitted_while_paused(broker: Broker) -> None:
    take_over(broker)
    broker.run_control.pause("freeze", "t")
    assert broker.ledger.admit(make_task(0)).answer == "paused"
    broker.run_control.pause("none", "t")
    assert broker.ledger.admit(make_task(0)).answer == "ok"


def test_the_first_delivery_of_a_sample_wins(broker: Broker) -> None:
    take_over(broker)
    broker.ledger.admit(make_task(0, n=2))
    first, second = broker.task_queue("first"), broker.task_queue("second")
    first.read(1, 10)
    assert second.publish(0, [make_trajectory(0, 0)]) == ["ok"]
    assert first.publish(0, [make_trajectory(0, 0), make_trajectory(0, 1)]) == ["dup", "ok"]
    assert broker.connection.client.xlen(broker.connection.keys.trajectories) == 2
    assert broker.connection.client.xlen(broker.connection.keys.tasks) == 0


def test_a_dead_generators_task_goes_to_another_with_what_is_missing(broker: Broker) -> None:
    take_over(broker)
    broker.ledger.admit(make_task(0, n=3))
    dead, alive = broker.task_queue("dead"), broker.task_queue("alive")
    dead.read(1, 10)
    dead.publish(0, [make_trajectory(0, 1)])
    (delivery,) = alive.claim_stale(lease_s=0.0, count=10)
    assert alive.find_missing(delivery.message) == [0, 2]


def test_a_task_that_kills_its_workers_ends_in_the_dead_letters(make_broker: Callable[..., Broker]) -> None:
    broker = make_broker(max_deliveries=2)
    take_over(broker)
    broker.ledger.admit(make_task(0))
    for name in ("a", "b", "c", "d"):
        broker.task_queue(name).claim_stale(0.0, 10) or broker.task_queue(name).read(1, 10)
    state = broker.ledger.read_state()
    assert state.failed == {"dead_letter": 1}
    assert state.balanced
    assert broker.connection.client.xlen(broker.connection.keys.dead) == 1


def test_a_failed_reward_excludes_the_sample_and_never_counts_as_zero(broker: Broker) -> None:
    training = take_over(broker)
    broker.ledger.admit(make_task(0))
    generate_and_score(broker, 0, (Score(reward=1.0), Score(status="timeout", reason="15 s")))
    outcomes = training.claim_scores(10)
    assert [outcome.trajectory_id is None for outcome in outcomes] == [False, True]
    assert broker.connection.client.xlen(broker.connection.keys.dead) == 1


def test_poison_on_the_wire_goes_to_the_dead_letters_and_the_group_goes_on(broker: Broker) -> None:
    training = take_over(broker)
    broker.ledger.admit(make_task(0, n=2))
    broker.task_queue("g").publish(0, [make_trajectory(0, 0), make_trajectory(0, 1)])
    client, keys = broker.connection.client, broker.connection.keys
    (first, _) = client.xrange(keys.trajectories)
    client.hset(keys.bodies, first[1][b"b"], b"\x00garbage")
    client.xadd(keys.trajectories, {"hello": "world"})
    client.xadd(keys.trajectories, {"t": 0, "s": 1, "b": "nothing.0"})
    rewards = broker.score_queue("r")
    good = rewards.read(10, 10)
    assert [item.message.sample for item in good] == [1]
    rewards.publish([(good[0], Score(reward=1.0))])
    outcomes = {outcome.sample: outcome.score.status for outcome in training.claim_scores(10)}
    assert outcomes == {0: "error", 1: "ok"}
    assert client.xlen(keys.dead) == 3


def test_a_dropped_group_returns_its_slot_and_its_data(broker: Broker) -> None:
    training = take_over(broker)
    broker.ledger.admit(make_task(0))
    generate_and_score(broker, 0, (Score(reward=1.0), Score(reward=1.0)))
    training.drop_group(0, "zero_variance", [outcome.scored_id for outcome in training.claim_scores(10)])
    state = broker.ledger.read_state()
    assert state.dropped == {"zero_variance": 1}
    assert state.samples_dropped == 2
    assert state.balanced
    assert set(count_entries(broker).values()) == {0}


def test_the_end_of_a_group_whose_answer_was_lost_is_repeated_with_the_same_answer(broker: Broker) -> None:
    training = take_over(broker)
    broker.ledger.admit(make_task(0))
    assert training.drop_group(0, "stale", [])
    assert training.drop_group(0, "stale", []), "the repeat of a call whose answer was lost"
    assert not training.drop_group(0, "zero_variance", [])
    assert not training.drop_group(1, "stale", [])
    assert broker.ledger.read_state().dropped == {"stale": 1}
    assert not take_over(broker, fresh=False).drop_group(0, "stale", []), "the end was the other trainer's"


def test_a_group_that_was_requeued_and_ended_elsewhere_is_not_ended_by_its_trainer_again(broker: Broker) -> None:
    training = take_over(broker)
    broker.ledger.admit(make_task(0))
    assert training.drop_group(0, "reward", [], "failed")
    letter = broker.connection.client.xadd(broker.connection.keys.dead, {"b": b""})
    assert broker.connection.run_script("requeue_group", letter, 0) == b"ok"
    assert broker.ledger.admit(make_task(0)).answer == "ok"
    ((entry, _),) = broker.connection.client.xrange(broker.connection.keys.tasks)
    assert broker.connection.run_script("fail_task", "tasks", entry, 0, b"") == b"ok"
    assert not training.drop_group(0, "reward", [], "failed"), "its second end was the generator's"
    assert broker.ledger.read_state().balanced


def test_a_new_trainer_finds_journal_and_entries_and_the_old_one_is_refused(broker: Broker) -> None:
    old = take_over(broker)
    broker.ledger.admit(make_task(0))
    generate_and_score(broker, 0, (Score(reward=1.0), Score(reward=0.0)))
    record = train_record(old, claim_batch(old))
    new = take_over(broker, fresh=False)
    assert broker.ledger.read_state().step == 1
    assert new.read_journal() == {0: record}
    with pytest.raises(FencedError):
        old.commit_steps([record])
    with pytest.raises(FencedError):
        old.claim_scores(1)
    assert [outcome.sample for outcome in new.claim_scores(10)] == [0, 1]
    new.complete_step(record)
    assert broker.ledger.read_state().trained == 1
    new.commit_steps([record])
    assert set(count_entries(broker).values()) == {0}


@pytest.mark.parametrize("version", [0, 3])
def test_evaluations_count_each_sample_once_and_leave_nothing_behind(broker: Broker, version: int) -> None:
    training = take_over(broker)
    assert broker.ledger.admit(make_task(0)).answer == "ok"
    tasks = [make_task(eval_task_id(version, i), n=1, kind="eval") for i in range(4)]
    assert broker.evals.open(version, tasks)
    assert not broker.evals.open(version, tasks)
    queue = broker.task_queue("g")
    for delivery in queue.read(10, 10):
        if delivery.message.kind == "train":
            continue
        assert delivery.version == version
        queue.publish(delivery.message.task_id, [make_trajectory(delivery.message.task_id, 0, kind="eval")])
    rewards = broker.score_queue("r")
    items = rewards.read(10, 10)
    rewards.publish([(item, Score(reward=float(i % 2))) for i, item in enumerate(items[:3])])
    rewards.publish([(items[3], Score(status="error", reason="no"))])
    (result,) = broker.evals.read_results()
    assert (result.n, result.scored, result.failed, result.complete) == (4, 3, 1, True)
    assert result.mean == pytest.approx(1 / 3)
    assert result.length == 1.0, "loss tokens of the scored samples"
    training.drop_group(0, "test", [])
    assert set(count_entries(broker).values()) == {0}


def test_an_evaluation_ends_though_a_task_of_it_kills_its_generators(make_broker: Callable[..., Broker]) -> None:
    broker = make_broker(max_deliveries=1)
    training = take_over(broker)
    number = eval_task_id(0, 0)
    assert broker.evals.open(0, [make_task(number, n=3, kind="eval")])
    for name in ("a", "b", "c"):
        queue = broker.task_queue(name)
        for _ in queue.claim_stale(0.0, 10) or queue.read(1, 10):
            queue.publish(number, [make_trajectory(number, 0, kind="eval")])
    (result,) = broker.evals.read_results()
    assert (result.failed, result.complete) == (2, False), "the sample that was published is still to be scored"
    rewards = broker.score_queue("r")
    rewards.publish([(item, Score(reward=1.0)) for item in rewards.read(10, 10)])
    (result,) = broker.evals.read_results()
    assert (result.scored, result.failed, result.complete) == (1, 2, True)
    assert set(count_entries(broker).values()) == {0}
    assert training.read_pipeline().balanced


def test_a_group_that_ended_is_not_taken_for_damaged(make_broker: Callable[..., Broker]) -> None:
    """A generator may end it between the trainer's look at the slots and that at the group."""
    broker = make_broker(max_deliveries=1)
    training = take_over(broker)
    broker.ledger.admit(make_task(0))
    assert training.diagnose_group(0) == "waiting"
    broker.task_queue("a").read(1, 10)
    for name in ("b", "c"):
        broker.task_queue(name).claim_stale(0.0, 10)
    assert broker.ledger.read_state().failed == {"dead_letter": 1}
    assert training.diagnose_group(0) == "ended"


def test_an_evaluation_task_that_nobody_can_read_counts_as_failed(broker: Broker) -> None:
    take_over(broker)
    number = eval_task_id(0, 0)
    assert broker.evals.open(0, [make_task(number, n=2, kind="eval")])
    client, keys = broker.connection.client, broker.connection.keys
    ((entry, fields),) = client.xrange(keys.eval_tasks)
    client.xdel(keys.eval_tasks, entry)
    client.hset(keys.groups, f"{number}:entry", client.xadd(keys.eval_tasks, {**fields, b"b": b"garbage"}))
    assert broker.task_queue("g").read(10, 10) == []
    (result,) = broker.evals.read_results()
    assert (result.failed, result.complete) == (2, True)
    assert set(count_entries(broker).values()) == {0}


def test_purging_a_run_leaves_the_others_alone(make_broker: Callable[..., Broker]) -> None:
    gone, kept = make_broker("gone"), make_broker("gone-not")
    for broker in (gone, kept):
        take_over(broker)
        broker.ledger.admit(make_task(0))
    assert gone.purge() > 0
    assert gone.purge() == 0
    assert kept.ledger.read_state().active == 1


def test_a_task_that_nobody_can_read_ends_its_group_and_the_queue_goes_on(broker: Broker) -> None:
    take_over(broker)
    for task_id in (0, 1):
        broker.ledger.admit(make_task(task_id))
    client, keys = broker.connection.client, broker.connection.keys
    (entry, fields), _ = client.xrange(keys.tasks)
    client.xdel(keys.tasks, entry)
    damaged = client.xadd(keys.tasks, {**fields, b"b": fields[b"b"][:-2]})
    client.hset(keys.groups, "0:entry", damaged)
    client.xadd(keys.tasks, {"hello": "world"})
    assert [item.message.task_id for item in broker.task_queue("g").read(10, 10)] == [1]
    state = broker.ledger.read_state()
    assert (state.active, state.failed, state.balanced) == (1, {"dead_letter": 1}, True)
    assert client.xlen(keys.dead) == 2
    assert client.xlen(keys.tasks) == 1


def test_a_task_that_kills_each_restarted_generator_is_a_dead_letter(
    make_broker: Callable[..., Broker],
) -> None:
    broker = make_broker(max_deliveries=2)
    take_over(broker)
    broker.ledger.admit(make_task(0))
    times = [len(broker.task_queue("same").read(1, 10)) for _ in range(4)]
    assert times[0] == 1
    assert times[-1] == 0
    assert broker.ledger.read_state().failed == {"dead_letter": 1}


def test_keys_of_the_pipeline_stay_within_the_most_live_groups(broker: Broker) -> None:
    training = take_over(broker, batch=BATCH, staleness=STALENESS, max_uncommitted=UNCOMMITTED)
    generators, rewards = broker.task_queue("g"), broker.score_queue("r")
    keys, client, next_task = broker.connection.keys, broker.connection.client, 0
    size = {"trajectories": client.xlen, "scored": client.xlen}
    done, waiting, found = list[BatchRecord](), list[ScoredSample](), dict[str, int]()
    for step in range(4 * UNCOMMITTED):
        admission = broker.ledger.admit_all([make_task(task) for task in range(next_task, next_task + 4 * BATCH)])
        next_task = admission.next
        for delivery in generators.read(100, 10):
            task = delivery.message.task_id
            generators.publish(task, [make_trajectory(task, sample) for sample in range(SAMPLES)])
        rewards.publish([(item, Score(reward=1.0)) for item in rewards.read(100, 10)])
        state = broker.ledger.read_state()
        bounds = length_bounds(state.live_bound, SAMPLES, UNCOMMITTED)
        for name in bounds:
            count: Any = size.get(name, client.hlen)(getattr(keys, name))
            assert count <= bounds[name], name
            found[name] = max(found.get(name, 0), count)
        waiting += training.claim_scores(1000)
        record = make_batch_record(waiting[: BATCH * SAMPLES], step)
        del waiting[: BATCH * SAMPLES]
        training.journal_batch(record)
        training.complete_step(record)
        done.append(record)
        if len(done) == UNCOMMITTED:
            training.commit_steps(done)
            done.clear()
    slots = BATCH * (STALENESS + 1)
    groups = slots + (UNCOMMITTED - 1) * BATCH
    # The number of its tokens stays until a group ends.
    fields = 4 * groups + slots
    assert fields <= found["groups"] <= fields + 1, "the bound, but for the step whose commit is due"
    assert found["bodies"] == SAMPLES * groups


def test_the_broker_keeps_new_evaluations_and_those_under_way(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "KEPT_EVALUATIONS", 3)
    take_over(broker)
    generators, rewards, lengths = broker.task_queue("g"), broker.score_queue("r"), list[int]()
    for version in range(9):
        task = eval_task_id(version, 0)
        assert broker.evals.open(version, [make_task(task, n=1, kind="eval")])
        generators.publish(task, [make_trajectory(task, 0, kind="eval", version=version)])
        # The first one is never scored.
        rewards.publish([(item, Score(reward=1.0)) for item in rewards.read(10, 10) if version])
        count: Any = broker.connection.client.hlen(broker.connection.keys.evals)
        lengths.append(count)
    assert [result.version for result in broker.evals.read_results()] == [0, 6, 7, 8]
    assert lengths[-1] == lengths[-2] == lengths[-3]
