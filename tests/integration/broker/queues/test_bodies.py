"""Bodies of samples, finished or partial, are stored exactly as long as they are needed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import redis

from broker.client import Broker
from broker.connection.keys import REWARD
from broker.queues.partials import joined, piece_of
from broker.queues.tasks import eval_task_id
from schemas.codec import Array, BadMessage, encode
from schemas.errors import BrokerDamaged, InfraError
from schemas.messages import Call, Partial, Score, Span, Trajectory
from tests.support.broker.prompt_groups import (
    claim_batch,
    count_entries,
    generate_and_score,
    make_task,
    make_trajectory,
    train_record,
)
from tests.support.broker.trainer_sessions import take_over


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


def test_a_delivery_whose_answer_is_lost_is_repeated(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert broker.task_queue("g").publish(0, [make_trajectory(0, 0)]) == ["ok"]
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
    (filed,) = broker.dead_letters.page(1000, None, newest=False)[0]
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


def partial(sample: int, *spans: tuple[int, int]) -> Partial:
    """(version, tokens) of each span; tokens count up."""
    ends = np.cumsum([length for _, length in spans])
    return Partial(
        sample=sample,
        tokens=Array.of(np.arange(ends[-1]) + 100 * sample, "i4"),
        logprobs=Array.of(-np.arange(ends[-1], dtype=np.float32), "f4"),
        spans=[Span(v, int(end - n), int(end)) for (v, n), end in zip(spans, ends, strict=True)],
    )


def episode(*lengths: int, **notes: str) -> Partial:
    """An unfinished episode with calls of these lengths."""
    calls = [
        Call(
            key=bytes([number]),
            tokens=Array.of(np.arange(length), "i4"),
            logprobs=Array.of(np.zeros(length), "f4"),
            spans=[Span(1, 0, length)],
            finish="stop",
        )
        for number, length in enumerate(lengths)
    ]
    none, no_logprobs = Array.of([], "i4"), Array.of([], "f4")
    return Partial(sample=0, tokens=none, logprobs=no_logprobs, spans=[], calls=calls, notes=notes)


def saved(broker: Broker) -> int:
    return broker.connection.client.hlen(broker.connection.keys.partials)


@pytest.mark.parametrize("cut", [0, 2, 3, 5])
def test_pieces_join_to_the_whole_wherever_they_were_cut(cut: int) -> None:
    whole = partial(1, (4, 3), (5, 4))
    first = Partial(
        sample=1,
        tokens=Array.of(whole.tokens.numpy()[:cut], "i4"),
        logprobs=Array.of(whole.logprobs.numpy()[:cut], "f4"),
        spans=[Span(s.version, s.start, min(s.end, cut)) for s in whole.spans if s.start < cut],
    )
    assert joined(1, [piece_of(first, 0), piece_of(whole, cut)]) == whole


def test_another_generator_finds_what_a_dead_one_had_saved(broker: Broker) -> None:
    take_over(broker)
    broker.ledger.admit(make_task(0, n=3))
    (delivery,) = broker.task_queue("dead").read(1, 10)
    dead, whole = broker.partials("dead"), partial(0, (1, 6), (2, 5))
    short = partial(0, (1, 4))
    growth = [(0, piece_of(short, 0)), (0, piece_of(partial(2, (1, 7)), 0))]
    assert dead.save_pieces([(0, delivery.entry_id, growth)]) == [[True, True]]
    for _ in range(2):  # the second time after a lost answer
        assert dead.save_pieces([(0, delivery.entry_id, [(1, piece_of(whole, 4))])]) == [[True]]
    (again,) = broker.task_queue("alive").claim_stale(lease_s=0.0, count=10)
    assert broker.partials("alive").load_partials(0, range(3)) == [whole, partial(2, (1, 7))]
    assert dead.save_pieces([(0, delivery.entry_id, [(2, piece_of(whole, 9))])]) == [[False]], (
        "it is not the owner any more"
    )
    alive = broker.partials("alive")
    assert alive.save_pieces([(0, again.entry_id, [(0, piece_of(partial(0, (3, 2)), 0))])]) == [[True]]
    assert alive.load_partials(0, [0]) == [partial(0, (3, 2))], "piece 0 restarts the sample"


def test_the_calls_and_notes_of_an_episode_are_saved_one_after_the_other(broker: Broker) -> None:
    take_over(broker)
    broker.ledger.admit(make_task(0))
    (delivery,) = broker.task_queue("g").read(1, 10)
    partials = broker.partials("g")

    def save(number: int, state: Partial, start: int, notes: int = 0) -> Partial:
        growth = [(number, piece_of(state, start, notes))]
        assert partials.save_pieces([(0, delivery.entry_id, growth)]) == [[True]]
        (found,) = partials.load_partials(0, [0])
        return found

    assert save(0, episode(n="1"), 0) == episode(n="1"), "a note alone is worth keeping"
    for number, lengths in enumerate([(3,), (3, 4), (3, 4, 5)], 1):
        assert save(number, episode(*lengths, n="1"), number - 1, 1) == episode(*lengths, n="1")
    changed = episode(3, 9, n="1", m="2")
    assert save(2, changed, 1, 1) == changed, "from the second call on it is another one"
    assert saved(broker) == 4


def test_a_piece_too_large_to_be_sent_keeps_no_other_from_being_saved(make_broker: Callable[..., Broker]) -> None:
    small = make_broker(max_message_bytes=4096)
    take_over(small)
    small.ledger.admit(make_task(0))
    (delivery,) = small.task_queue("g").read(1, 10)
    partials = small.partials("g")
    growth = [(0, piece_of(state, 0)) for state in (episode(1000), partial(1, (1, 5)))]
    assert partials.save_pieces([(0, delivery.entry_id, growth)]) == [[False, True]]
    assert partials.load_partials(0, [0, 1]) == [partial(1, (1, 5))]


def test_pieces_of_two_generators_are_never_joined(broker: Broker) -> None:
    take_over(broker)
    broker.ledger.admit(make_task(0))
    first, second = broker.partials("first"), broker.partials("second")
    (delivery,) = broker.task_queue("first").read(1, 10)
    entry, mine, theirs = delivery.entry_id, partial(0, (1, 9)), partial(0, (2, 6))
    assert first.save_pieces([(0, entry, [(0, piece_of(partial(0, (1, 4)), 0))])]) == [[True]]
    broker.task_queue("second").claim_stale(0.0, 1)
    assert second.save_pieces([(0, entry, [(0, piece_of(theirs, 0)), (0, piece_of(partial(1, (2, 3)), 0))])])
    broker.task_queue("first").claim_stale(0.0, 1)
    others = (0, piece_of(partial(1, (1, 2)), 0))
    assert first.save_pieces([(0, entry, [(1, piece_of(mine, 6)), others])]) == [[False, True]]
    assert first.load_partials(0, [0]) == [theirs]
    assert first.save_pieces([(0, entry, [(0, piece_of(mine, 0))])]) == [[True]], "it restarts the sample"
    assert first.load_partials(0, [0]) == [mine]


def test_nothing_is_saved_of_what_is_published_ended_or_handed_on(broker: Broker) -> None:
    take_over(broker)
    broker.ledger.admit(make_task(0))
    queue, partials = broker.task_queue("g"), broker.partials("g")
    (delivery,) = queue.read(1, 10)
    pieces = [(0, piece_of(partial(sample, (0, 5)), 0)) for sample in (0, 1)]
    queue.publish(0, [make_trajectory(0, 0)])
    assert partials.save_pieces([(0, delivery.entry_id, pieces[:1])]) == [[False]]
    assert partials.save_pieces([(0, delivery.entry_id, pieces)]) == [[False, True]]
    assert [part.sample for part in partials.load_partials(0, [0, 1])] == [1]
    assert queue.return_task(delivery, delivery.message)
    assert partials.save_pieces([(0, delivery.entry_id, pieces)]) == [[False, False]]
    assert [part.sample for part in partials.load_partials(0, [1])] == [1], "what was saved is there for the next one"
    (again,) = queue.read(1, 10)
    queue.publish(0, [make_trajectory(0, 1)])
    assert saved(broker) == 0
    assert partials.save_pieces([(0, again.entry_id, pieces)]) == [[False, False]]
    assert saved(broker) == 0


@pytest.mark.parametrize("end", ["trained", "dropped", "rebuilt"])
def test_what_is_saved_of_a_group_ends_with_it(broker: Broker, end: str) -> None:
    training = take_over(broker)
    broker.ledger.admit(make_task(0))
    queue = broker.task_queue("g")
    (delivery,) = queue.read(1, 10)
    assert broker.partials("g").save_pieces([(0, delivery.entry_id, [(0, piece_of(partial(1, (0, 5)), 0))])]) == [
        [True]
    ]
    assert saved(broker) == 2
    if end == "trained":
        queue.publish(0, [make_trajectory(0, 0)])
        queue.fail_sample(0, 1, "can't be made")
        results = broker.score_queue("r")
        results.publish([(item, Score(reward=1.0)) for item in results.read(10, 10)])
        train_record(training, claim_batch(training), commit=True)
        assert set(count_entries(broker).values()) == {0}
    elif end == "dropped":
        training.drop_group(0, "too_old", [])
    else:
        broker.connection.client.delete(broker.connection.keys.ctl)
        take_over(broker, fresh=False)
    assert saved(broker) == 0


def test_a_damaged_piece_ends_what_can_be_gone_on_from(broker: Broker) -> None:
    take_over(broker)
    broker.ledger.admit(make_task(0))
    (delivery,) = broker.task_queue("g").read(1, 10)
    partials, whole = broker.partials("g"), partial(0, (1, 9))
    for number, start in enumerate((0, 3, 6)):
        part = partial(0, (1, start + 3))
        assert partials.save_pieces([(0, delivery.entry_id, [(number, piece_of(part, start))])]) == [[True]]
    assert partials.load_partials(0, [0]) == [whole]
    broker.connection.client.hset(broker.connection.keys.partials, "0:0:1", b"garbage")
    assert partials.load_partials(0, [0]) == [partial(0, (1, 3))]


def test_a_run_that_saves_nothing_pays_nothing(broker: Broker) -> None:
    take_over(broker)
    broker.ledger.admit(make_task(0))
    generate_and_score(broker, 0, (Score(reward=1.0), Score(reward=0.0)))
    assert saved(broker) == 0
    assert broker.partials("g").load_partials(0, [0, 1]) == []
