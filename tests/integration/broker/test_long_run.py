"""A long run in small: whatever its services do again and again, no key of it at the broker grows."""

import itertools
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker.client import Broker
from broker.flow.owner import Owner
from broker.queues.tasks import eval_task_id
from broker.telemetry.heartbeats import FORGOTTEN_S
from schemas.codec import Array, encode
from schemas.messages import Event, Heartbeat, Partial, Piece, Question, QuestionAnswer, Sampling, Score, Span
from tests.support.broker.prompt_groups import make_batch_record, make_task, make_trajectory, train_record
from tests.support.broker.trainer_sessions import take_over
from tests.support.models.changing_weights import ChangingWeights

ROUNDS = 60
SLACK = 1.15, 2_048
"""A key may differ by so much, and so many bytes: hash tables double, and streams delete whole nodes."""
NOT_WRITTEN = {
    "readmit": "tasks of a broker that lost its data",
    "roll": "members of a broadcast",
    "roll_answers": "members of a broadcast",
    "roll_changes": "members of a broadcast",
    "peers": "machines that pass weights on; a lease of each ends",
}
"""Keys that this run has no need of, and what is in them."""


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reach the limits of a week within seconds."""
    monkeypatch.setattr("broker.telemetry.events.KEEP_LINES", 50)
    monkeypatch.setattr("broker.telemetry.metrics.KEEP_LINES", 50)
    monkeypatch.setattr("broker.telemetry.trajectories.KEEP", 20)
    monkeypatch.setattr("broker.flow.trainer_session.SILENT_CONSUMER_S", 0)
    monkeypatch.setattr("broker.evaluations.store.KEPT_EVALUATIONS", 5)
    monkeypatch.setattr("broker.queues.live_episodes.MOST_KEPT", 10)
    monkeypatch.setattr("broker.queues.questions.MOST_ANSWERS", 10)


class LongRun:
    """A run of one group a step, whose generators and reward services have another name each time."""

    def __init__(self, broker: Broker, weights: ChangingWeights, training: Any) -> None:
        self._broker, self._weights, self._training = broker, weights, training
        self._version = itertools.count(1)
        self.seen: set[str] = set()
        broker.owner.claim(Owner("run", "folder", "host"))

    def round(self, number: int) -> None:
        """Everything that happens to a group, and beside it."""
        broker, generator, reward = self._broker, f"g{number}", f"r{number}"
        queue, scores = broker.task_queue(generator), broker.score_queue(reward)
        self._report(number, generator)
        following = broker.ledger.admit(make_task(1 << 31)).next
        images = {f"image {number}": b"x" * 1000}
        tasks = [make_task(following + k) for k in range(4)]
        broker.ledger.admit_all(tasks, prompts={task.task_id: task.task_id % 7 for task in tasks})
        if number % 3 == 0:
            evaluated = [make_task(eval_task_id(number, k), n=1, kind="eval") for k in range(2)]
            assert broker.evals.open(number, evaluated)
            evaluations = queue.take_evaluations(number, 2).taken
            for item in evaluations:
                queue.publish(item.message.task_id, [make_trajectory(item.message.task_id, 0, kind="eval")])
                queue.release(item)
        self._look()
        for item in queue.read(10, 10):
            task_id = item.message.task_id
            queue.keep_images(task_id, images)
            one = Array.of([1], "i4")
            part = Partial(sample=0, tokens=one, logprobs=Array.of([0.0], "f4"), spans=[Span(0, 0, 1)])
            broker.partials(generator).save_pieces([(task_id, item.entry_id, [(0, Piece(start=0, partial=part))])])
            self._look()
            if task_id % 4 == 1:
                queue.fail_sample(task_id, 0, "no")
                queue.fail_sample(task_id, 1, "no")
            else:
                queue.publish(task_id, [make_trajectory(task_id, k) for k in range(2)])
            queue.release(item)
        self._look()
        scored = scores.read(100, 10)
        scores.publish([(item, Score(reward=1.0)) for item in scored])
        broker.eval_samples.keep([(one.message, Score(reward=1.0)) for one in scored if one.message.kind == "eval"])
        self._train(number)
        self._talk(number, generator, following)

    def _look(self) -> None:
        """Note which keys are there now; most are empty between two rounds."""
        client, keys = self._broker.connection.client, vars(self._broker.connection.keys)
        new = keys.keys() - {"base"} - self.seen
        with client.pipeline(transaction=False) as pipe:
            for name in new:
                pipe.exists(keys[name])
            self.seen |= {name for name, there in zip(new, pipe.execute(), strict=True) if there}

    def _train(self, number: int) -> None:
        training, broker = self._training, self._broker
        self._look()
        outcomes = training.claim_scores(1000)
        ended = {"failed": [one for one in outcomes if one.task_id % 4 == 1]}
        ended["dropped"] = [one for one in outcomes if one.task_id % 4 == 2]
        for how in ("failed", "dropped"):
            for task_id in {one.task_id for one in ended[how]}:
                own = [one.scored_id for one in ended[how] if one.task_id == task_id]
                training.drop_group(task_id, "test", own, how)
        left = [one for one in outcomes if one not in (*ended["failed"], *ended["dropped"])]
        record = train_record(training, make_batch_record(left, number))
        self._look()
        training.commit_steps([record])
        broker.trajectory_store.keep(number, [(make_trajectory(group.task_id, 0), 1.0) for group in record.groups])
        broker.eval_samples.take("0-0", "9999999999999-0")
        self._weights.publish(next(self._version))
        broker.weights.note_verdict(number, f"g{number}", "no")
        broker.ledger.change_settings({"lr": 1.0 / (1 + number)})

    def _report(self, number: int, generator: str) -> None:
        heartbeats, keys = self._broker.heartbeats, self._broker.connection.keys
        beat = Heartbeat(service=f"g{number - 1}", role="generator", host="h", pid=1, state="running")
        beat.time = heartbeats.read_clock() - 2 * FORGOTTEN_S
        self._broker.connection.client.hset(keys.services, beat.service, encode(beat))
        heartbeats.send(msgspec.structs.replace(beat, service=generator))
        for _ in range(5):
            self._broker.events.emit(Event(name="test", service=generator, text="x" * 1_000))
            self._broker.metrics.append({"step": number, "text": "x" * 1_000})
        self._broker.run_control.scale("generator", number % 2, "me")

    def _talk(self, number: int, generator: str, task_id: int) -> None:
        broker, live = self._broker, self._broker.live_episodes(generator)
        broker.questions.ask(Question(id=str(number), until=1e12, sampling=Sampling(), text="?"))
        self._look()
        question = broker.questions.take()
        assert question is not None
        broker.questions.answer(QuestionAnswer(id=question.id, generator=generator, error="x" * 1_000))
        following = broker.ledger.admit(make_task(1 << 31)).next
        assert broker.ledger.admit(make_task(following)).answer == "ok"
        live.register(f"{following}:0", "http://g")
        self._look()
        begun = live.begin("t")
        assert begun is not None
        live.reward(begun[0], "t", 1.0, 60.0)
        self._training.drop_group(following, "test", [], "dropped")


def sizes(broker: Broker) -> dict[str, int]:
    """Return the bytes of each key of the run that is there."""
    client: Any = broker.connection.client
    names = {name: key for name, key in vars(broker.connection.keys).items() if name != "base"}
    found = {name: client.memory_usage(key, samples=0) for name, key in names.items()}
    return {name: size for name, size in found.items() if size}


@pytest.fixture
def run(broker: Broker, tmp_path: Path) -> Iterator[LongRun]:
    training = take_over(broker, batch=4, staleness=7, steps=10**6, max_uncommitted=2)
    with closing(ChangingWeights(broker, tmp_path, "redis", training.leader_term)) as weights:
        yield LongRun(broker, weights, training)


def test_no_key_grows_with_the_length_of_a_run(broker: Broker, run: LongRun) -> None:
    client, keys = broker.connection.client, broker.connection.keys
    # Dead letters and failed groups have limits that would take thousands of rounds.
    for _ in range(1_000):
        client.xadd(keys.dead, {"b": b"x" * 200})
    client.zadd(keys.failed, {str(-number): 0 for number in range(1, 10_001)})
    for number in range(ROUNDS):
        run.round(number)
    before = sizes(broker)
    for number in range(ROUNDS, 4 * ROUNDS):
        run.round(number)
    grown = {
        name: (before.get(name, 0), size)
        for name, size in sizes(broker).items()
        if size > SLACK[0] * before.get(name, 0) + SLACK[1]
    }
    assert grown == {}
    assert vars(broker.connection.keys).keys() - {"base"} - run.seen == NOT_WRITTEN.keys()
