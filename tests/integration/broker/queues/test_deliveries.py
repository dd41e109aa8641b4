"""What counts as a delivery, which mended mishaps are counted, and what waits in the streams."""

import threading
import time
from collections.abc import Callable

import pytest
import redis

from broker.client import Broker
from broker.connection.keys import GENERATORS
from broker.telemetry.heartbeats import FORGOTTEN_S
from broker.telemetry.stream_lag import StreamLag, read_stream_lags
from schemas.codec import encode
from schemas.errors import FencedError
from schemas.messages import Heartbeat, Score
from tests.support.broker.prompt_groups import claim_batch, make_task, make_trajectory, train_record
from tests.support.broker.trainer_sessions import take_over


def cut_while_reading(broker: Broker, read: Callable[[], object]) -> None:
    """The connection of a worker is killed while it waits for entries."""
    losses, number = broker.connection.losses, broker.connection.client.client_id()
    end = time.monotonic() + 10

    def read_on() -> None:
        while broker.connection.losses == losses and time.monotonic() < end:
            read()

    reading = threading.Thread(target=read_on)
    reading.start()
    admin = redis.Redis.from_url(broker.connection.url)
    while broker.connection.losses == losses and time.monotonic() < end:
        blocked = [client for client in admin.client_list(client_id=[number]) if "b" in client["flags"]]
        if blocked:
            admin.client_kill_filter(_id=str(number))
        time.sleep(0.005)
    reading.join(10)
    admin.close()
    assert broker.connection.losses == losses + 1


def count_dead_letters(broker: Broker) -> int:
    return int(broker.connection.client.xlen(broker.connection.keys.dead))


def test_a_long_task_survives_lost_connections_and_then_one_replacement(broker: Broker) -> None:
    take_over(broker)
    broker.ledger.admit(make_task(0))
    long = broker.task_queue("long")
    assert long.read(1, 10)
    for _ in range(6):
        cut_while_reading(broker, lambda: long.read(1, 200))
    (delivery,) = broker.task_queue("next").claim_stale(0.0, 10)
    assert delivery.redelivered
    assert count_dead_letters(broker) == 0
    assert broker.ledger.read_state().failed == {}


def test_a_long_reward_survives_lost_connections_and_then_one_replacement(broker: Broker) -> None:
    take_over(broker)
    broker.ledger.admit(make_task(0))
    broker.task_queue("g").publish(0, [make_trajectory(0, 0)])
    long = broker.score_queue("long")
    assert long.read(1, 10)
    for _ in range(6):
        cut_while_reading(broker, lambda: long.read(1, 200))
    assert len(broker.score_queue("next").claim_stale(0.0, 10)) == 1
    assert count_dead_letters(broker) == 0


def lose_answer(broker: Broker, generator: str, count: int) -> None:
    """The server delivers entries in a reply that is lost."""
    broker.connection.client.xreadgroup("generators", generator, {broker.connection.keys.tasks: ">"}, count)
    broker.connection.losses += 1


def test_what_a_lost_answer_held_is_taken_up_and_not_counted_again(broker: Broker) -> None:
    take_over(broker)
    for task_id in range(3):
        broker.ledger.admit(make_task(task_id))
    queue = broker.task_queue("g")
    assert [item.message.task_id for item in queue.read(1, 10)] == [0]
    lose_answer(broker, "g", 2)
    found = queue.read(10, 10)
    assert [item.message.task_id for item in found] == [1, 2]
    assert all(item.redelivered for item in found)
    pending = broker.connection.client.xpending_range(broker.connection.keys.tasks, "generators", "-", "+", 10)
    assert [item["times_delivered"] for item in pending] == [1, 1, 1]


@pytest.mark.parametrize("back", ["under its own name", "after the lease", "as another"])
def test_a_task_that_kills_its_generators_is_given_up_at_last(make_broker: Callable[..., Broker], back: str) -> None:
    broker = make_broker(max_deliveries=3)
    take_over(broker)
    broker.ledger.admit(make_task(0))
    lives = 0
    while count_dead_letters(broker) == 0:
        queue = broker.task_queue(f"g-{lives}" if back == "as another" else "g")
        found = queue.read(1, 10) if back == "under its own name" else queue.claim_stale(0.0, 1) or queue.read(1, 10)
        lives += bool(found)
        assert lives <= 3
    assert lives == 3
    assert broker.ledger.read_state().failed == {"dead_letter": 1}


def owner_of(broker: Broker, entry: bytes) -> str:
    (item,) = broker.connection.client.xpending_range(broker.connection.keys.tasks, "generators", entry, entry, 1)
    return str(item["consumer"].decode())


def test_a_worker_that_was_silent_for_a_lease_does_not_take_its_work_back(broker: Broker) -> None:
    take_over(broker)
    for task_id in range(2):
        broker.ledger.admit(make_task(task_id))
    silent, other = broker.task_queue("silent"), broker.task_queue("other")
    first, second = silent.read(2, 10)
    (claimed,) = other.claim_stale(0.0, 1)
    assert claimed.entry_id == first.entry_id
    assert silent.renew_leases() == [first.entry_id], "it hears which work is no longer its own"
    assert [owner_of(broker, item.entry_id) for item in (first, second)] == ["other", "silent"]
    assert silent.renew_leases() == []
    assert other.renew_leases() == []


def test_a_worker_whose_work_was_taken_over_does_not_hand_it_to_a_third(broker: Broker) -> None:
    take_over(broker)
    broker.ledger.admit(make_task(0))
    silent, other = broker.task_queue("silent"), broker.task_queue("other")
    (delivery,) = silent.read(1, 10)
    assert other.claim_stale(0.0, 1)
    assert not silent.return_task(delivery, delivery.message)
    assert owner_of(broker, delivery.entry_id) == "other"
    assert other.renew_leases() == []


def set_idle(broker: Broker, generator: str, entry: bytes, idle_ms: int) -> None:
    """When an entry was delivered, as its server remembers it."""
    client, keys = broker.connection.client, broker.connection.keys
    client.xclaim(keys.tasks, "generators", generator, 0, [entry], idle=idle_ms, justid=True)


@pytest.mark.parametrize("loss", ["lease", "group", "data"])
def test_a_sample_fails_only_if_the_generator_that_has_its_task_says_so(broker: Broker, loss: str) -> None:
    take_over(broker)
    broker.ledger.admit(make_task(0))
    before, after = broker.task_queue("before"), broker.task_queue("after")
    (old,) = before.read(1, 10)
    if loss == "lease":
        (new,) = after.claim_stale(0.0, 10)
    elif loss == "group":
        broker.connection.client.xgroup_destroy(broker.connection.keys.tasks, GENERATORS)
        (new,) = after.read(1, 10)
    else:
        broker.connection.client.flushall()
        take_over(broker)
        broker.ledger.admit(make_task(0))
        (new,) = after.read(1, 10)
    before.fail_sample(0, 0, "of what is no more", delivery=old)
    assert count_dead_letters(broker) == 0
    assert after.find_missing(new.message) == [0, 1]
    after.fail_sample(0, 0, "really", delivery=new)
    assert count_dead_letters(broker) == 1
    assert after.find_missing(new.message) == [1]


def test_a_dead_workers_task_is_claimed_behind_many_of_a_living_one(broker: Broker) -> None:
    take_over(broker, staleness=99)
    broker.ledger.admit_all([make_task(task_id) for task_id in range(50)])
    broker.task_queue("living").read(49, 10)
    (last,) = broker.task_queue("dead").read(1, 10)
    set_idle(broker, "dead", last.entry_id, 60_000)
    assert [item.message.task_id for item in broker.task_queue("next").claim_stale(30.0, 1)] == [49]


def test_leases_of_the_future_are_found_behind_many_others(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.queues.consumer_group.LOOK_AT", 10)
    take_over(broker, staleness=99)
    broker.ledger.admit_all([make_task(task_id) for task_id in range(36)])
    living = broker.task_queue("living")
    living.read(35, 10)
    (last,) = broker.task_queue("dead").read(1, 10)
    set_idle(broker, "dead", last.entry_id, -3_600_000)
    following, end = broker.task_queue("next"), time.monotonic() + 10
    found: list[int] = []
    while not found and time.monotonic() < end:
        living.renew_leases()
        found = [item.message.task_id for item in following.claim_stale(1.0, 1)]
        time.sleep(0.02)
    assert found == [35]


def consumers(broker: Broker, stream: str, group: str) -> set[str]:
    key = getattr(broker.connection.keys, stream)
    return {item["name"].decode() for item in broker.connection.client.xinfo_consumers(key, group)}


def test_a_commit_forgets_workers_long_gone_but_not_their_work(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    take_over(broker).claim_scores(1)
    training = take_over(broker, fresh=False)
    broker.ledger.admit_all([make_task(task_id) for task_id in range(2)])
    gone, holding = broker.task_queue("gone"), broker.task_queue("holding")
    gone.read(1, 10)
    gone.publish(0, [make_trajectory(0, 0), make_trajectory(0, 1)])
    assert holding.read(1, 10)
    rewards = broker.score_queue("gone")
    rewards.publish([(item, Score(reward=1.0)) for item in rewards.read(2, 10)])
    record = train_record(training, claim_batch(training), commit=True)
    assert consumers(broker, "tasks", "generators") == {"gone", "holding"}
    monkeypatch.setattr("broker.flow.trainer_session.SILENT_CONSUMER_S", 0.0)
    training.commit_steps([record])
    assert consumers(broker, "tasks", "generators") == {"holding"}
    assert consumers(broker, "trajectories", "reward") == consumers(broker, "scored", "trainer") == set()
    assert [item.message.task_id for item in broker.task_queue("next").claim_stale(0.0, 10)] == [1]
    assert broker.ledger.admit(make_task(2)).answer == "ok"
    assert [item.message.task_id for item in gone.read(1, 10)] == [2], "it was only slow, and is there again"


def test_leases_duplicates_and_late_samples_are_counted(broker: Broker) -> None:
    take_over(broker)
    broker.ledger.admit(make_task(0))
    first, second = broker.task_queue("first"), broker.task_queue("second")
    first.read(1, 10)
    assert second.claim_stale(0.0, 10)
    second.publish(0, [make_trajectory(0, 0)])
    assert first.publish(0, [make_trajectory(0, 0), make_trajectory(0, 1)]) == ["dup", "ok"]
    assert first.publish(7, [make_trajectory(7, 0)]) == ["closed"]
    scores = broker.score_queue("r")
    items = scores.read(2, 10)
    scores.publish([(item, Score(reward=1.0)) for item in items])
    assert scores.publish([(items[0], Score(reward=1.0))]) == ["dup"]
    assert broker.ledger.read_state().counters == {
        "leases_expired:generators": 1,
        "duplicate:publish": 1,
        "closed": 1,
        "duplicate:score": 1,
    }


def test_a_replaced_trainer_is_counted(make_broker: Callable[..., Broker]) -> None:
    broker = make_broker("zombie")
    old = take_over(broker)
    take_over(broker)
    with pytest.raises(FencedError):
        old.finish_run()
    with pytest.raises(FencedError):
        old.read_pipeline()
    assert broker.ledger.read_state().counters == {"fenced": 2}


def test_counting_harms_nothing_when_its_key_is_something_else(broker: Broker) -> None:
    take_over(broker)
    broker.ledger.admit(make_task(0))
    queue = broker.task_queue("g")
    queue.read(1, 10)
    queue.publish(0, [make_trajectory(0, 0)])
    broker.connection.client.set(broker.connection.keys.counters, "hello")
    assert queue.publish(0, [make_trajectory(0, 0)]) == ["dup"]


def test_whoever_joins_clears_away_what_left_long_ago_without_a_word(broker: Broker) -> None:
    now = broker.heartbeats.read_clock()

    def beat(name: str, silent_s: float) -> None:
        body = Heartbeat(service=name, role="generator", host="h", pid=1, state="running", time=now - silent_s)
        broker.connection.client.hset(broker.connection.keys.services, name, encode(body))

    for number in range(50):
        beat(f"gone-{number}", FORGOTTEN_S + 60)
    beat("quiet", FORGOTTEN_S / 2)
    broker.connection.client.hset(broker.connection.keys.services, "broken", b"\xc1")
    fresh = Heartbeat(service="fresh", role="generator", host="h", pid=1, state="running")
    broker.heartbeats.send(fresh)
    assert [one.service for one in broker.heartbeats.list()] == ["fresh", "quiet"]


def tasks(broker: Broker, surplus: dict[str, int]) -> StreamLag:
    return next(lag for lag in read_stream_lags(broker.connection, surplus) if lag.name == "tasks")


def forget_reads(broker: Broker) -> None:
    """What a restart from the append-only file does to the group's count."""
    keys = broker.connection.keys
    groups = broker.connection.run("groups", lambda client: client.xinfo_groups(keys.tasks))
    for group in groups:
        name, last = group["name"], group["last-delivered-id"]
        broker.connection.run(
            "set", lambda client, n, i: client.xgroup_setid(keys.tasks, n, i, entries_read=0), name, last
        )


def test_what_waits_is_exact_after_the_server_lost_count(broker: Broker) -> None:
    take_over(broker)
    surplus: dict[str, int] = {}
    for number in range(2):
        broker.ledger.admit(make_task(number))
    assert (tasks(broker, surplus).waiting, tasks(broker, surplus).entered) == (2, 2)
    broker.task_queue("g").read(2, 10)
    forget_reads(broker)
    seen = tasks(broker, surplus)
    assert (seen.waiting, seen.pending, seen.entered) == (0, 2, 2)
    broker.ledger.admit(make_task(2))
    seen = tasks(broker, surplus)
    assert (seen.waiting, seen.pending, seen.entered) == (1, 2, 3)
    # Who has not looked before can't know the surplus; there is never more than the stream holds.
    assert tasks(broker, {}).waiting <= seen.length


def test_what_waits_is_known_although_some_were_deleted_unread(broker: Broker) -> None:
    """The server does not know the lag then, and never again, even once all the rest is read."""
    take_over(broker)
    surplus: dict[str, int] = {}
    for number in range(4):
        broker.ledger.admit(make_task(number))
    key, queue = broker.connection.keys.tasks, broker.task_queue("g")
    queue.read(1, 10)
    entries = broker.connection.run("range", lambda client: client.xrange(key))
    broker.connection.run("delete", lambda client: client.xdel(key, entries[2][0]))
    (group,) = broker.connection.run("groups", lambda client: client.xinfo_groups(key))
    assert group["lag"] is None
    seen = tasks(broker, surplus)
    assert (seen.length, seen.waiting, seen.pending) == (3, 2, 1)
    queue.read(2, 10)
    seen = tasks(broker, surplus)
    assert (seen.waiting, seen.pending) == (0, 3)
    broker.ledger.admit(make_task(4))
    assert (tasks(broker, surplus).waiting, tasks(broker, {}).waiting) == (1, 1)
