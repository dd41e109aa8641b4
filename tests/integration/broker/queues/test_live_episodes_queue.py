"""The records of users' conversations: who holds each, and which reward counts."""

import msgspec
import pytest

from broker.client import Broker
from broker.flow.trainer_session import TrainerSession
from broker.queues import live_episodes
from broker.queues.dead_letters import letter_bytes
from schemas.messages import DeadLetter
from tests.support.broker.prompt_groups import make_task
from tests.support.broker.trainer_sessions import take_over


def admit_tasks(broker: Broker) -> TrainerSession:
    training = take_over(broker)
    for task_id in range(4):
        assert broker.ledger.admit(make_task(task_id, n=1)).answer == "ok"
    return training


def test_a_conversation_takes_the_sample_that_was_offered_first_and_each_once(broker: Broker) -> None:
    admit_tasks(broker)
    live = broker.live_episodes("g")
    assert live.begin("a") is None
    first, _ = live.register("1-0", "http://g/1")
    second, _ = live.register("2-0", "http://g/2")
    assert len({first, second}) == 2
    assert live.register("1-0", "http://g/1")[0] == first, "the same sample again"
    taken = [found for _ in range(3) if (found := live.begin("a"))]
    assert {id for id, _ in taken} == {first, second}
    assert all(record.begun > 0 and record.tenant == "a" for _, record in taken)


def test_a_sample_whose_group_has_ended_is_offered_to_nobody(broker: Broker) -> None:
    """Its conversation would wait for a generator that never comes, and its record would stay for ever."""
    training = admit_tasks(broker)
    live = broker.live_episodes("g")
    gone, _ = live.register("1-0", "http://g/1")
    id, _ = live.register("2-0", "http://g/2")
    assert training.drop_group(1, "test", [], "dropped", 0.5)
    begun = live.begin("a")
    assert begun is not None
    assert (begun[0], live.begin("a")) == (id, None)
    assert not live.read([gone])[1]
    assert broker.connection.client.hlen(broker.connection.keys.live) == 2, "a record and its sample"


def test_a_conversation_follows_its_sample_and_is_let_go_only_by_its_holder(broker: Broker) -> None:
    admit_tasks(broker)
    before, after = broker.live_episodes("before"), broker.live_episodes("after")
    id, _ = before.register("1-0", "http://before")
    assert before.begin("") is not None
    again, record = after.register("1-0", "http://after")
    assert (again, record.url, record.generator) == (id, "http://after", "after")
    before.release("1-0", "http://before")
    assert after.read([id])[1][id].url == "http://after"
    after.register("1-0", "http://after/again")
    after.release("1-0", "http://after")
    assert after.read([id])[1][id].url == "http://after/again", "a session lets go late, and the next one has it"
    after.release("1-0", "http://after/again")
    after.release("3-0", "http://after")
    now, records = after.read([id, "other"])
    assert (records[id].url, records[id].begun <= now, {*records}) == ("", True, {id})


def test_conversations_whose_samples_are_made_again_are_gone(broker: Broker) -> None:
    """Their answers went with the pipeline: a reward of one would go to what another user is answered."""
    training = admit_tasks(broker)
    client, keys = broker.connection.client, broker.connection.keys
    live = broker.live_episodes("g")
    ids = []
    for task in range(4):
        ids.append(live.register(f"{task}-0", "http://g")[0])
        if task < 3:
            assert live.begin("a") is not None
            assert live.reward(ids[-1], "a", 1.0, 60)[0] == "ok"
    client.set(keys.tasks, "of another type")
    # The sample of task 0 is in the weights.
    retaken = take_over(broker, cursor=2, unfinished=[1])
    assert retaken.leader_term != training.leader_term
    assert {*live.read(ids)[1]} == {ids[0], ids[3]}, "and one that waits for a user"
    assert live.reward(ids[0], "a", 0.0, 60) == ("same", 1.0)
    assert live.reward(ids[1], "a", 1.0, 60) == ("unknown", None)
    again, record = live.register("1-0", "http://g")
    assert (again in ids, record.begun, record.reward) == (False, 0, None)


def test_a_group_that_is_asked_for_again_begins_a_new_conversation(broker: Broker) -> None:
    """The reward of the first would end the group before a user comes."""
    take_over(broker)
    broker.ledger.admit(make_task(0, n=1))
    live = broker.live_episodes("g")
    id, _ = live.register("0-0", "http://g")
    assert live.begin("a") is not None
    assert live.reward(id, "a", 1.0, 60) == ("ok", 1.0)
    (delivery,) = broker.task_queue("g").read(1, 1)
    letter = letter_bytes(DeadLetter(source="x", reason="no", deliveries=9, payload=b"", task_id=0), 9)
    broker.connection.run_script("fail_task", "tasks", delivery.entry_id, 0, letter)
    (filed,) = broker.dead_letters.page(9, None, newest=False)[0]
    assert broker.dead_letters.requeue(filed.id) == "ok"
    assert broker.ledger.admit(make_task(0, n=1)).answer == "ok"
    again, record = live.register("0-0", "http://g")
    assert (again == id, record.begun, record.reward) == (False, 0, None)
    assert live.reward(id, "a", 0.0, 60) == ("unknown", None)
    assert broker.connection.client.zcard(broker.connection.keys.live_begun) == 0


def test_the_first_of_rewards_and_end_counts(broker: Broker) -> None:
    admit_tasks(broker)
    live = broker.live_episodes("g")
    ids = [live.register(f"{task}-0", "http://g")[0] for task in range(3)]
    assert live.reward(ids[0], "", 1.0, 60) == ("unknown", None), "no user has begun it"
    for _ in ids:
        live.begin("a")
    assert live.reward(ids[0], "b", 1.0, 60) == ("unknown", None), "of another tenant"
    assert live.reward(ids[0], "a", 0.1 + 0.2, 60) == ("ok", 0.1 + 0.2)
    assert live.reward(ids[0], "a", 1.0, 60) == ("same", 0.1 + 0.2)
    assert live.end(ids[0]) == 0.1 + 0.2
    assert live.end(ids[1]) is None
    assert live.reward(ids[1], "a", 1.0, 60) == ("ended", None)
    assert live.reward(ids[2], "a", 1.0, -1) == ("late", None)
    assert live.read([ids[1]])[1][ids[1]].ended


def test_only_the_newest_records_are_kept(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    admit_tasks(broker)
    monkeypatch.setattr(live_episodes, "MOST_KEPT", 2)
    live = broker.live_episodes("g")
    for task in range(4):
        live.register(f"{task}-0", "http://g")
        live.begin("")
    assert broker.connection.client.zcard(broker.connection.keys.live_begun) == 2
    assert broker.connection.client.hlen(broker.connection.keys.live) == 4, "two records and their samples"


def test_a_new_run_of_the_name_does_not_continue_the_conversations_of_the_old_one(broker: Broker) -> None:
    admit_tasks(broker)
    client, keys = broker.connection.client, broker.connection.keys
    client.hset(keys.groups, "run", "old")
    live = broker.live_episodes("g")
    id, _ = live.register("1-0", "http://g")
    live.begin("")
    client.hset(keys.groups, "run", "new")
    other, record = live.register("1-0", "http://g")
    assert other != id
    assert record.begun == 0
    assert {*live.read([id, other])[1]} == {other}


def test_what_was_offered_before_the_trainer_mended_the_broker_is_given_to_nobody(broker: Broker) -> None:
    """A generator that offers the sample again deletes such a record: a conversation would lose it, and its reward."""
    live = broker.live_episodes("g")
    early, record = live.register("1-0", "http://g/before")
    assert record.run == "", "the broker has lost its data, and no trainer has taken over yet"
    admit_tasks(broker)
    broker.connection.client.hset(broker.connection.keys.groups, "run", "the run")
    assert live.begin("a") is None
    id, _ = live.register("1-0", "http://g/after")
    begun = live.begin("a")
    assert begun is not None
    assert begun[0] == id != early
    live.register("1-0", "http://other/after")
    assert live.reward(id, "a", 1.0, 60) == ("ok", 1.0)


def test_what_is_no_id_and_what_is_no_record_are_unknown(broker: Broker) -> None:
    admit_tasks(broker)
    live = broker.live_episodes("g")
    id, _ = live.register("1-0", "http://g")
    live.begin("")
    broker.connection.client.hset(broker.connection.keys.live, "damaged", b"text")
    record = {"run": "", "seat": "1-1", "url": "", "generator": "", "begun": 1.0, "reward": "much"}
    broker.connection.client.hset(broker.connection.keys.live, "no-number", msgspec.msgpack.encode(record))
    asked = ["seat:1-0", "damaged", "no-number", "", "no such", "\N{BLACK STAR}", id]
    assert {*live.read(asked)[1]} == {id}
    for wrong in ("seat:1-0", "", "no such"):
        assert live.reward(wrong, "", 1.0, 60.0) == ("unknown", None)
    assert live.reward(id, "", 1.0, 60.0) == ("ok", 1.0)
