"""A broker that forgot: what the next take-over restores, and which failed groups it requeues."""

from dataclasses import replace

import pytest

from broker.client import Broker
from broker.connection.keys import Keys
from broker.evaluations.results import EvalResult
from broker.flow.trainer_session import TrainerSession
from broker.queues.dead_letters import UnusableTask
from broker.queues.tasks import eval_task_id
from schemas.codec import encode
from schemas.errors import BrokerLost, ConfigError, FencedError
from schemas.messages import DeadLetter, Score
from tests.support.broker.broker_loss import checkpoint, train_one, training_lifetime, wipe
from tests.support.broker.prompt_groups import claim_batch, generate_and_score, make_task
from tests.support.broker.trainer_sessions import change_request, take_over, take_over_as


def test_a_wiped_broker_admits_what_was_unfinished_first_and_then_goes_on(broker: Broker) -> None:
    training = take_over(broker)
    train_one(broker, training, 0)
    for task_id in (1, 2, 3):
        broker.ledger.admit(make_task(task_id))
    training.drop_group(2, "stale", [])
    saved = checkpoint(training)
    wipe(broker)
    with pytest.raises(BrokerLost):
        training.read_pipeline()
    _, takeover = take_over_as(broker, saved)
    assert takeover.lost
    assert (takeover.step, takeover.broker_lifetime) == (1, takeover.leader_term)
    state = broker.ledger.read_state()
    assert (state.cursor, state.readmit, state.active, state.trained, state.dropped) == (4, 2, 0, 1, {"stale": 1})
    assert state.balanced
    order = []
    following = 0
    while len(order) < 3:
        answer = broker.ledger.admit(make_task(following))
        if answer.answer == "ok":
            order.append(following)
        following = answer.next
    assert order == [1, 3, 4]
    assert broker.ledger.read_state().balanced


def test_a_lost_broker_takes_a_version_that_nobody_has_seen(broker: Broker) -> None:
    training = take_over(broker)
    train_one(broker, training, 0)
    saved = change_request(checkpoint(training), version_if_lost=9)
    wipe(broker)
    assert take_over_as(broker, saved)[1].version == 9
    assert broker.ledger.read_state().version == 9


def test_a_take_over_without_loss_changes_nothing(broker: Broker) -> None:
    training = take_over(broker)
    train_one(broker, training, 0)
    saved = checkpoint(training)
    train_one(broker, training, 1)
    broker.ledger.admit(make_task(2))
    before = broker.ledger.read_state()
    _, takeover = take_over_as(broker, saved)
    after = broker.ledger.read_state()
    assert not takeover.lost
    assert (takeover.step, takeover.broker_lifetime) == (2, "start")
    assert replace(after, leader_term=before.leader_term) == before


def test_a_step_that_the_journal_lacks_means_everything_is_built_anew(broker: Broker) -> None:
    training = take_over(broker)
    train_one(broker, training, 0)
    saved = checkpoint(training)
    train_one(broker, training, 1)
    broker.connection.client.hdel(broker.connection.keys.journal, "1")
    _, takeover = take_over_as(broker, saved)
    assert takeover.lost
    state = broker.ledger.read_state()
    assert (state.step, state.cursor, state.active, state.trained) == (1, 1, 0, 1)
    assert broker.ledger.admit(make_task(1)).answer == "ok", "the group whose step is lost is made again"


def test_a_trainer_that_lives_on_also_needs_the_journal_back_to_its_checkpoint(broker: Broker) -> None:
    training = take_over(broker)
    for task_id in (0, 1):
        train_one(broker, training, task_id)
    alive = change_request(checkpoint(training), saved=0)
    assert not take_over_as(broker, alive)[1].lost
    broker.connection.client.delete(broker.connection.keys.journal)
    assert take_over_as(broker, alive)[1].lost


def test_a_checkpoint_of_another_lifetime_does_not_fit(broker: Broker) -> None:
    training = take_over(broker)
    train_one(broker, training, 0)
    assert take_over_as(broker, checkpoint(training, broker_lifetime="7-beef"))[1].lost


def test_an_empty_folder_beside_a_run_that_went_on_is_refused(broker: Broker) -> None:
    training = take_over(broker)
    train_one(broker, training, 0)
    record = training.read_journal()[0]
    training.commit_steps([record])
    with pytest.raises(ConfigError, match="tidemill purge"):
        take_over(broker)


def test_a_key_of_the_wrong_type_is_lost_and_mended(broker: Broker) -> None:
    training = take_over(broker)
    broker.ledger.admit(make_task(0))
    saved = checkpoint(training)
    client, keys = broker.connection.client, broker.connection.keys
    client.delete(keys.slots)
    client.set(keys.slots, "hello")
    with pytest.raises(BrokerLost):
        training.read_pipeline()
    assert take_over_as(broker, saved)[1].lost
    assert broker.ledger.read_state().readmit == 1
    assert broker.ledger.read_state().balanced


def test_a_commit_leaves_no_body_behind_when_the_samples_are_gone(broker: Broker) -> None:
    training = take_over(broker)
    train_one(broker, training, 0)
    client, keys = broker.connection.client, broker.connection.keys
    client.delete(keys.samples)
    training.commit_steps(list(training.read_journal().values()))
    assert (client.xlen(keys.trajectories), client.hlen(keys.bodies)) == (0, 0)


def test_a_term_that_is_none_is_lost_and_mended(broker: Broker) -> None:
    training = take_over(broker)
    saved = checkpoint(training)
    broker.connection.client.set(broker.connection.keys.leader_term, "hello")
    with pytest.raises(BrokerLost):
        training.read_pipeline()
    with pytest.raises(BrokerLost):
        training.drop_group(0, "stale", [])
    take_over_as(broker, saved)[0].read_pipeline()


def test_live_changes_and_pause_outlive_a_wiped_broker(broker: Broker) -> None:
    training = take_over(broker)
    assert broker.ledger.change_settings({"staleness": 2})
    assert broker.ledger.change_settings({"batch": 3})
    assert broker.ledger.read_state().capacity == 9
    look = training.read_pipeline()
    assert (look.staleness, look.batch, look.settings) == (2, 3, {"staleness": 2, "batch": 3})
    saved = change_request(checkpoint(training), settings=look.settings, pause="freeze", pause_id=3)
    wipe(broker)
    take_over_as(broker, saved)
    state = broker.ledger.read_state()
    assert (state.capacity, state.staleness, state.paused) == (9, 2, True)
    broker.ledger.change_settings({"staleness": None})
    take_over_as(broker, change_request(saved, broker_lifetime=training_lifetime(broker), settings={}))
    assert broker.ledger.read_state().staleness == 7


def test_complete_evaluations_outlive_a_wiped_broker(broker: Broker) -> None:
    training = take_over(broker)
    line = {"version": 0, "n": 4, "scored": 3, "failed": 1, "off_version": 2, "mean": 0.1 + 0.2, "time": 1.7e9 + 0.25}
    lines = [line | {"length": 12 + 1 / 3}, line | {"version": 4, "scored": 0, "mean": None}]
    saved = change_request(checkpoint(training), evaluations=lines)
    wipe(broker)
    take_over_as(broker, saved)
    first, second = broker.evals.read_results()
    approx = pytest.approx
    assert first == EvalResult(4, 3, 1, approx(0.3), approx(12 + 1 / 3), version=0, time=1.7e9 + 0.25, off_version=2)
    assert (second.version, second.scored, second.mean, second.length) == (4, 0, 0.0, None)
    assert not broker.evals.open(0, [make_task(eval_task_id(0, 0), kind="eval")]), "it is not made again"


def test_an_older_trainer_does_not_take_a_newer_ones_broker_for_lost(broker: Broker) -> None:
    old = take_over(broker)
    take_over(broker, fresh=False)
    with pytest.raises(FencedError):
        old.read_pipeline()
    with pytest.raises(FencedError):
        old.drop_group(0, "stale", [])


PIPELINE = (
    "bodies",
    "slots",
    "counts",
    "groups",
    "samples",
    "tasks",
    "eval_tasks",
    "trajectories",
    "scored",
    "journal",
    "images",
)


LEDGER = ("ctl", "readmit")


BESIDE = [name for name in vars(Keys("p", "r")) if name not in ("base", "leader_term", *PIPELINE, *LEDGER)]


@pytest.mark.parametrize("name", [*PIPELINE, *LEDGER, *BESIDE])
def test_a_take_over_frees_every_key_of_a_foreign_value_and_loses_only_the_pipelines(broker: Broker, name: str) -> None:
    training = take_over(broker)
    train_one(broker, training, 0)
    broker.ledger.admit(make_task(1))
    saved = checkpoint(training)
    client, key = broker.connection.client, getattr(broker.connection.keys, name)
    if name == "prompts":
        # The curriculum's statistics are a string themselves.
        client.rpush(key, "hello")
    else:
        client.set(key, "hello")
    foreign = client.type(key)
    assert take_over_as(broker, saved)[1].lost == (name not in BESIDE)
    assert client.type(key) != foreign
    assert broker.ledger.read_state().balanced


@pytest.mark.parametrize("name", ["tasks", "eval_tasks", "trajectories", "scored"])
def test_a_take_over_notices_a_stream_that_is_gone(broker: Broker, name: str) -> None:
    """Not later, when a group waits in vain: what is acknowledged until then would be made again."""
    training = take_over(broker)
    train_one(broker, training, 0)
    broker.ledger.admit(make_task(1))
    saved = checkpoint(training)
    assert not take_over_as(broker, saved)[1].lost
    broker.connection.client.delete(getattr(broker.connection.keys, name))
    assert take_over_as(broker, saved)[1].lost
    state = broker.ledger.read_state()
    assert (state.readmit, state.trained, state.balanced) == (1, 1, True)


def test_tasks_behind_a_gap_in_those_that_are_made_again_are_answered_for_too(broker: Broker) -> None:
    training = take_over(broker)
    for task_id in range(5):
        broker.ledger.admit(make_task(task_id))
    training.drop_group(1, "stale", [])
    saved = checkpoint(training)
    wipe(broker)
    take_over_as(broker, saved)
    broken = UnusableTask(3, 2, "half a character")
    admission = broker.ledger.admit_all([make_task(0), make_task(1), make_task(2), broken, make_task(4)])
    assert (admission.answer, admission.next) == ("moved", 5)
    assert admission.admitted == [0, 2, 3, 4]
    assert list(admission.unusable) == [3]


def test_a_field_that_a_group_lost_is_noticed_with_a_curriculum_too(broker: Broker) -> None:
    """A group has a field more then, so a number of fields would not say that another one is gone."""
    training = take_over(broker)
    train_one(broker, training, 0)
    saved = checkpoint(training)
    tasks = [make_task(1), make_task(2)]
    broker.ledger.admit_all(tasks, prompts={1: 1, 2: 2})
    assert not take_over_as(broker, saved)[1].lost
    broker.connection.client.hdel(broker.connection.keys.groups, "1:left")
    _, takeover = take_over_as(broker, saved)
    assert takeover.lost
    assert broker.ledger.read_state().balanced


def fail_group(broker: Broker, training: TrainerSession, task_id: int) -> str:
    """A group that no generator can make: its dead letter."""
    client, keys = broker.connection.client, broker.connection.keys
    assert broker.ledger.admit(make_task(task_id)).answer == "ok"
    client.hset(keys.groups, f"{task_id}:entry", client.xadd(keys.tasks, {"t": task_id, "b": b"garbage"}))
    broker.task_queue("g").read(10, 10)
    assert training.read_pipeline().unfinished == set()
    return broker.dead_letters.page(1000, None, newest=False)[0][-1].id


@pytest.mark.parametrize("known", ["unfinished", "not yet admitted"])
def test_a_failed_group_that_a_mended_broker_makes_again_is_not_requeued(broker: Broker, known: str) -> None:
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
    assert broker.ledger.read_state().balanced, "the trainer can continue"


def test_a_group_that_failed_before_the_loss_is_still_requeued(broker: Broker) -> None:
    training = take_over(broker)
    letter = fail_group(broker, training, 0)
    assert take_over_as(broker, change_request(checkpoint(training), broker_lifetime="7-beef"))[1].lost
    assert broker.dead_letters.requeue(letter) == "ok"
    assert broker.ledger.admit(make_task(0)).answer == "ok"
    assert broker.ledger.read_state().balanced
