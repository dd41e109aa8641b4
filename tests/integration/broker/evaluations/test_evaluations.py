"""Evaluations are opened whole or not at all and end whatever the broker loses; their samples wait to be written."""

from typing import Any

import msgspec
import pytest

from broker.client import Broker
from broker.evaluations import samples as samples_module
from broker.evaluations.samples import COMPLETION
from broker.queues.consumer_group import BYTES_AT_ONCE
from broker.queues.tasks import eval_task_id
from schemas.messages import Score, Task
from tests.support.broker.prompt_groups import count_entries, make_task, make_trajectory
from tests.support.broker.trainer_sessions import take_over

MB = 1 << 20


def held_out(version: int, count: int, text: str = "1+1=", n: int = 1) -> list[Task]:
    """Tasks of an evaluation, all with this prompt."""
    ids = [eval_task_id(version, index) for index in range(count)]
    return [msgspec.structs.replace(make_task(number, n=n, kind="eval"), text=text) for number in ids]


def answer_all(broker: Broker, n: int = 1) -> None:
    """Generate what is queued, with ``n`` samples a task."""
    queue = broker.task_queue("g")
    for delivery in queue.read(100, 10):
        number = delivery.message.task_id
        queue.publish(number, [make_trajectory(number, sample, "eval") for sample in range(n)])
        queue.release(delivery)


def score_all(broker: Broker) -> None:
    rewards = broker.score_queue("r")
    rewards.publish([(item, Score(reward=1.0)) for item in rewards.read(100, 10)])


def watch_scripts(broker: Broker, monkeypatch: pytest.MonkeyPatch, die_at: int = -1) -> list[int]:
    """Bytes of the calls of scripts from here on; the process is killed before the call of this number."""
    sizes, real = list[int](), broker.connection._evaluate

    def evaluate(client: Any, name: str, args: tuple[Any, ...]) -> Any:
        if len(sizes) == die_at:
            raise KeyboardInterrupt
        sizes.append(sum(len(arg) for arg in args if isinstance(arg, bytes)))
        return real(client, name, args)

    monkeypatch.setattr(broker.connection, "_evaluate", evaluate)
    return sizes


def test_tasks_are_sent_in_parts_and_all_are_there_at_once(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    take_over(broker)
    tasks = held_out(0, 8, text="x" * (5 * MB))
    sizes = watch_scripts(broker, monkeypatch)
    assert broker.evals.open(0, tasks)
    assert max(sizes) <= BYTES_AT_ONCE
    assert 40 * MB <= sum(sizes) < 41 * MB
    sizes.clear()
    assert not broker.evals.open(0, tasks)
    assert len(sizes) == 1, "it was opened before: the rest is not sent"
    monkeypatch.undo()
    queue = broker.task_queue("g")
    assert [item.message for item in queue.read(100, 10)] == tasks
    for task in tasks:
        queue.publish(task.task_id, [make_trajectory(task.task_id, 0, "eval")])
    score_all(broker)
    (result,) = broker.evals.read_results()
    assert (result.complete, result.scored) == (True, 8)
    assert set(count_entries(broker).values()) == {0}


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_who_dies_between_two_parts_has_opened_nothing_and_the_next_one_opens_all(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    take_over(broker)
    tasks = held_out(0, 130)
    watch_scripts(broker, monkeypatch, die_at=calls)
    with pytest.raises(KeyboardInterrupt):
        broker.evals.open(0, tasks)
    monkeypatch.undo()
    assert broker.evals.read_results() == []
    assert broker.task_queue("g").read(200, 10) == []
    assert broker.connection.client.hlen(broker.connection.keys.bodies) == min(64 * calls, 130)
    assert broker.evals.open(0, tasks)
    assert [item.message for item in broker.task_queue("g").read(200, 10)] == tasks


def test_parts_of_a_dead_feeder_go_with_the_next_evaluation(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    take_over(broker)
    watch_scripts(broker, monkeypatch, die_at=1)
    with pytest.raises(KeyboardInterrupt):
        broker.evals.open(0, held_out(0, 130))
    monkeypatch.undo()
    assert broker.evals.open(1, held_out(1, 3))
    assert broker.connection.client.hlen(broker.connection.keys.bodies) == 3
    answer_all(broker)
    score_all(broker)
    assert set(count_entries(broker).values()) == {0}


def test_parts_lost_before_the_evaluation_opened_are_resent(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    take_over(broker)
    tasks, calls, real = held_out(0, 100), list[str](), broker.connection._evaluate

    def evaluate(client: Any, name: str, args: tuple[Any, ...]) -> Any:
        calls.append(name)
        if len(calls) == 2:
            client.delete(broker.connection.keys.bodies)
        return real(client, name, args)

    monkeypatch.setattr(broker.connection, "_evaluate", evaluate)
    assert broker.evals.open(0, tasks)
    monkeypatch.undo()
    assert [item.message for item in broker.task_queue("g").read(200, 10)] == tasks


def test_a_task_whose_body_is_lost_counts_as_failed(broker: Broker) -> None:
    take_over(broker)
    tasks = held_out(0, 2, n=2)
    broker.evals.open(0, tasks)
    broker.connection.client.hdel(broker.connection.keys.bodies, str(tasks[0].task_id))
    answer_all(broker, n=2)
    score_all(broker)
    (result,) = broker.evals.read_results()
    assert (result.complete, result.scored, result.failed) == (True, 2, 2)
    (filed,) = broker.dead_letters.page(1000, None, newest=False)[0]
    assert (filed.letter.task_id, filed.letter.reason) == (tasks[0].task_id, "its body is not there")
    assert set(count_entries(broker).values()) == {0}


def delete_entries(broker: Broker, stream: str, task: Task) -> None:
    client = broker.connection.client
    entries: Any = client.xrange(stream)
    client.xdel(stream, *[id for id, fields in entries if int(fields[b"t"]) == task.task_id])


def test_samples_whose_entries_are_gone_are_queued_again(broker: Broker) -> None:
    take_over(broker)
    tasks = first, second, third = held_out(0, 3, n=2)
    assert broker.evals.open(0, tasks)
    queue, keys = broker.task_queue("g"), broker.connection.keys
    queue.read(100, 10)
    for task in (first, second):
        queue.publish(task.task_id, [make_trajectory(task.task_id, 0, "eval")])
    assert broker.evals.mend() == {0: (0, 0, 6)}, "all are on their way"
    delete_entries(broker, keys.trajectories, first)
    delete_entries(broker, keys.eval_tasks, second)
    assert broker.evals.mend() == {0: (2, 0, 6)}
    assert broker.evals.mend() == {0: (0, 0, 6)}
    other = broker.task_queue("h")
    (delivery,) = other.read(10, 10)
    assert (delivery.message, other.find_missing(delivery.message)) == (second, [1])
    assert other.publish(second.task_id, [make_trajectory(second.task_id, 1, "eval")]) == ["ok"]
    late = [make_trajectory(second.task_id, 1, "eval")]
    assert queue.publish(second.task_id, late) == ["dup"], "who had the task before"
    queue.publish(first.task_id, [make_trajectory(first.task_id, 1, "eval")])
    queue.publish(third.task_id, [make_trajectory(third.task_id, sample, "eval") for sample in range(2)])
    score_all(broker)
    (result,) = broker.evals.read_results()
    assert (result.complete, result.scored, result.failed) == (True, 6, 0)
    assert set(count_entries(broker).values()) == {0}


@pytest.mark.parametrize("lost", ["trajectories", "eval_tasks", "bodies", "samples"])
def test_an_evaluation_ends_though_a_whole_key_of_it_is_lost(broker: Broker, lost: str) -> None:
    take_over(broker)
    tasks = first, *_ = held_out(0, 3, n=2)
    assert broker.evals.open(0, tasks)
    broker.task_queue("g").publish(first.task_id, [make_trajectory(first.task_id, 0, "eval")])
    broker.connection.client.delete(getattr(broker.connection.keys, lost))
    broker.evals.mend()
    answer_all(broker, n=2)
    score_all(broker)
    broker.evals.mend()
    (result,) = broker.evals.read_results()
    assert (result.complete, result.n) == (True, 6)
    assert result.failed == (6 if lost == "bodies" else 0)
    assert set(count_entries(broker).values()) == {0}


def test_samples_of_which_entries_and_bodies_are_gone_count_as_failed(broker: Broker) -> None:
    take_over(broker)
    (task,), (later,) = held_out(0, 1, n=2), held_out(4, 1, n=3)
    for version, one in ((0, task), (4, later)):
        assert broker.evals.open(version, [one])
    queue, client, keys = broker.task_queue("g"), broker.connection.client, broker.connection.keys
    queue.publish(task.task_id, [make_trajectory(task.task_id, 0, "eval")])
    client.delete(keys.bodies, keys.trajectories)
    delete_entries(broker, keys.eval_tasks, later)
    assert broker.evals.mend() == {0: (0, 1, 1), 4: (0, 3, 0)}
    queue.publish(task.task_id, [make_trajectory(task.task_id, 1, "eval")])
    score_all(broker)
    zero, four = broker.evals.read_results()
    assert (zero.complete, zero.scored, zero.failed) == (True, 1, 1)
    assert (four.complete, four.scored, four.failed) == (True, 0, 3)
    assert set(count_entries(broker).values()) == {0}


def test_samples_wait_until_they_are_written_and_no_longer(broker: Broker) -> None:
    samples = broker.eval_samples
    samples.keep(
        [(make_trajectory(eval_task_id(4, 7), k), Score(reward=0.5, components={"exact": 1.0})) for k in range(3)]
    )
    samples.keep([(make_trajectory(eval_task_id(4, 8), 0), Score(status="error", reason="it raised"))])
    found = samples.take("0-0", "")
    assert [(line["version"], line["index"], line["sample"]["sample"]) for _, line in found] == [
        (4, 7, 0),
        (4, 7, 1),
        (4, 7, 2),
        (4, 8, 0),
    ]
    assert found[0][1]["sample"]["terms"] == {"exact": 1.0}
    assert found[3][1]["sample"]["reward"] is None
    assert len(samples.take(found[1][0], found[1][0])) == 2
    assert broker.connection.client.xlen(broker.connection.keys.eval_samples) == 2
    assert samples.take(found[3][0], found[3][0]) == []
    assert broker.connection.client.xlen(broker.connection.keys.eval_samples) == 0


def test_texts_of_any_script_are_kept_within_a_bound_of_bytes(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples_module, "KEEP_BYTES", 300_000)
    for k in range(200):
        sample = make_trajectory(eval_task_id(0, k), 0)
        fields = {name: getattr(sample, name) for name in sample.__struct_fields__ if name != "schema"}
        text = "\u4e2d" * 2_000 + "\ud800"
        broker.eval_samples.keep([(type(sample)(**{**fields, "completion": text}), Score(reward=1.0))])
    client: Any = broker.connection.client
    assert client.memory_usage(broker.connection.keys.eval_samples, samples=0) <= 300_000
    found = broker.eval_samples.take("0-0", "")
    assert found[-1][1]["index"] == 199, "the newest are kept"
    assert found[-1][1]["sample"]["completion"] == text
    assert len(found) > 300_000 / (4 * 6_000), "a character takes three bytes, not six"


def test_a_long_text_is_cut_and_what_is_no_sample_left_out(broker: Broker) -> None:
    long = make_trajectory(eval_task_id(0, 0), 0)
    fields = {name: getattr(long, name) for name in long.__struct_fields__ if name != "schema"}
    broker.eval_samples.keep([(type(long)(**{**fields, "completion": "x" * 99_999}), Score(reward=1.0))])
    broker.connection.client.xadd(broker.connection.keys.eval_samples, {"j": "no json"})
    ((_, line),) = broker.eval_samples.take("0-0", "")
    assert len(line["sample"]["completion"]) == COMPLETION
