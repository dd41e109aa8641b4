"""A broker that loses data during training: no prompt is skipped or trained twice, and no version is reused."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.client import Broker
from broker.flow.trainer_session import Diagnosis
from broker.queues.consumer_group import Delivery
from broker.queues.tasks import TaskQueue, eval_task_id
from consumers.trainer import batch_source as source_module
from consumers.trainer import loop as loop_module
from consumers.trainer import step_log as step_log_module
from consumers.trainer.checkpoint.store import CheckpointStore, Taken
from consumers.trainer.loop import Trainer
from schemas.config import DatasetConfig, EvalConfig
from schemas.messages import Sampling, Score, Task, Trajectory
from schemas.run_folder import read_lines
from schemas.system.lifecycle import StopFlag
from tests.support.broker.prompt_groups import make_task
from tests.support.broker.prompt_groups import make_trajectory as make_eval_trajectory
from tests.support.trainer.deterministic_run import Pipeline
from tests.support.trainer.trainer_loop import (
    in_thread,
    join,
    publish_of_version,
    run,
    train_to_last_evaluation,
    trained,
    until,
)


def test_a_wiped_broker_is_mended_in_training(trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path) -> None:
    one = trainer(steps=12)
    with Pipeline(broker, publish_of_version):
        thread, errors = in_thread(one, StopFlag())
        for step in (2, 7):
            until(lambda step=step: one.progress.step >= step, f"step {step}")
            broker.purge()
        join(thread, errors, 90)
    times = trained(tmp_path)
    assert set(times.values()) == {1}
    assert set(times) == set(range(24)), "no prompt is skipped"
    state = broker.ledger.read_state()
    assert state.balanced
    assert state.trained == 24
    versions = [line["version"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert versions == sorted(set(versions))


def test_evaluations_are_kept_in_the_runs_folder_once_each_when_the_broker_forgets_them(
    trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path
) -> None:
    def complete(version: int, total: float) -> None:
        """What the broker holds of an evaluation of 4 samples, all scored."""
        fields = {"n": 4, "scored": 4, "sum": total, "tokens": 40, "time": time.time()}
        values = {f"{version}:{name}": value for name, value in fields.items()}
        broker.connection.client.hset(broker.connection.keys.evals, mapping=values)

    file = tmp_path / "run" / "evaluations.jsonl"
    for last, versions in ((3, [0, 3]), (6, [0, 3, 6])):
        one = trainer(steps=last)
        one.config.eval = EvalConfig(dataset=DatasetConfig(name="arithmetic"))
        with Pipeline(broker, publish_of_version):
            thread, errors = in_thread(one, StopFlag())
            until(lambda one=one, last=last: one.progress.step >= last, f"step {last}")
            complete(0, 1.0)
            complete(last, 3.0)
            join(thread, errors)
        assert [(line["version"], line["mean"]) for line in read_lines(file)] == [
            (version, 0.75 if version else 0.25) for version in versions
        ]
        lines = {line["step"]: line for line in read_lines(tmp_path / "run" / "metrics.jsonl")}
        assert (lines[last]["eval/reward"], lines[last]["eval/length"], lines[last]["eval/version"]) == (0.75, 10, last)
        assert "train/loss" in lines[last], "the step's own figures"
        broker.purge()


def test_a_trainer_that_dies_with_its_broker_gives_its_weights_new_numbers(
    trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path
) -> None:
    first, stop = trainer(steps=5, checkpoint={"every": 3}), StopFlag()
    with Pipeline(broker, publish_of_version):
        real = CheckpointStore.take
        saved: list[int] = []

        def take_once(self: CheckpointStore, *args: Any, **kwargs: Any) -> Taken:
            if saved:
                raise RuntimeError("killed")
            saved.append(kwargs["step"])
            return real(self, *args, **kwargs)

        CheckpointStore.take = take_once  # type: ignore[method-assign]
        try:
            with pytest.raises(RuntimeError, match="killed"):
                run(first, stop)
        finally:
            CheckpointStore.take = real  # type: ignore[method-assign]
        assert saved == [3]
        assert first.progress.step == 5
        published = json.loads((tmp_path / "run" / "checkpoints" / "LEADER_TERM").read_text())["version"]
        broker.purge()
        second = trainer(steps=8)
        run(second)
    assert second.progress.step == 8
    after = [line["version"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")][5:]
    assert min(after) > published, "a number that named lost weights names no others"
    assert set(trained(tmp_path).values()) == {1}
    assert set(trained(tmp_path)) == set(range(16))


@pytest.mark.parametrize("lost", [("bodies",), ("bodies", "trajectories"), ("bodies", "eval_tasks")])
def test_a_run_ends_with_an_evaluation_of_which_the_broker_lost_a_part_and_says_so(
    trainer: Callable[..., Trainer],
    broker: Broker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lost: tuple[str, ...],
) -> None:
    monkeypatch.setattr(step_log_module, "LOOK_S", 0.1)
    one = trainer(steps=1)
    thread, errors = train_to_last_evaluation(one, broker, StopFlag())
    tasks, task = broker.task_queue("g"), make_task(eval_task_id(1, 0), n=2, kind="eval")
    assert broker.evals.open(1, [task])
    if "eval_tasks" not in lost:
        tasks.publish(task.task_id, [make_eval_trajectory(task.task_id, sample, "eval") for sample in range(2)])
    broker.connection.client.delete(*(getattr(broker.connection.keys, name) for name in lost))
    assert broker.score_queue("r").read(10, 10) == []
    join(thread, errors)
    (line,) = read_lines(tmp_path / "run" / "evaluations.jsonl")
    assert (line["version"], line["n"], line["scored"], line["failed"]) == (1, 2, 0, 2)
    told = [
        event.text
        for event in [stored.event for stored in broker.events.newest(100)]
        if event.name == "evaluation" and event.level == "warning"
    ]
    assert [text for text in told if text.startswith("2 of 2 samples of the evaluation of version 1 failed")]
    assert any("0 samples are queued again, 2 count as failed" in text for text in told) == (len(lost) > 1)


@pytest.mark.parametrize("lost", ["evals", "groups"])
def test_the_last_evaluation_is_made_anew_when_the_broker_has_lost_what_it_needs(
    trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    monkeypatch.setattr(loop_module, "QUIET_S", 0.1)
    one = trainer(steps=1)
    thread, errors = train_to_last_evaluation(one, broker, StopFlag())
    tasks, task = broker.task_queue("g"), make_task(eval_task_id(1, 0), n=2, kind="eval")
    assert broker.evals.open(1, [task])
    tasks.publish(task.task_id, [make_eval_trajectory(task.task_id, sample, "eval") for sample in range(2)])
    rewards = broker.score_queue("r")
    first, second = rewards.read(10, 100)
    rewards.publish([(first, Score(reward=0.0))])
    known = broker.ledger.read_state().broker_lifetime
    broker.connection.client.delete(getattr(broker.connection.keys, lost))
    rewards.publish([(second, Score(reward=0.0))])
    until(lambda: broker.ledger.read_state().broker_lifetime != known, "the mended broker")
    assert broker.evals.open(1, [task]), "as the feeder does in a mended broker"
    tasks.publish(task.task_id, [make_eval_trajectory(task.task_id, sample, "eval") for sample in range(2)])
    rewards.publish([(found, Score(reward=1.0)) for found in rewards.read(10, 100)])
    join(thread, errors)
    (line,) = read_lines(tmp_path / "run" / "evaluations.jsonl")
    assert (line["version"], line["n"], line["scored"], line["mean"]) == (1, 2, 2, 1.0)
    assert broker.ledger.read_state().state == "finished"


PARTS = ["ctl", "slots", "counts", "groups", "samples", "tasks", "trajectories", "bodies", "scored", "journal"]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_the_broker_that_vanishes_stops_nothing_and_skips_nothing(
    trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(source_module, "QUIET_S", 0.2)
    one = trainer(steps=10)
    with Pipeline(broker, publish_of_version):
        thread, errors = in_thread(one, StopFlag())
        until(lambda: one.progress.step >= 2, "step 2")
        broker.connection.client.delete(getattr(broker.connection.keys, part))
        join(thread, errors, 90)
    assert set(trained(tmp_path).values()) == {1}
    assert set(trained(tmp_path)) == set(range(20)), "no prompt is skipped"
    assert broker.ledger.read_state().balanced


def test_a_pause_outlives_the_loss_of_the_orders_and_ends_when_people_say_so(
    trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path
) -> None:
    one = trainer(steps=8)
    with Pipeline(broker, publish_of_version):
        thread, errors = in_thread(one, StopFlag())
        until(lambda: one.progress.step >= 2, "step 2")
        assert broker.run_control.pause("freeze", "ada")
        until(lambda: one.pause.acknowledged.get("pause") == 1, "the pause")
        step = one.progress.step
        broker.connection.client.delete(broker.connection.keys.run_control)
        until(lambda: (orders := broker.run_control.read()) is not None and orders.pause == "freeze", "the same order")
        until(lambda: bool(one.pause.reasons), "the pause")
        assert one.progress.step == step
        assert broker.run_control.pause("none", "ada")
        join(thread, errors)
    assert set(trained(tmp_path).values()) == {1}
    assert set(trained(tmp_path)) == set(range(16))


def test_a_loss_in_the_oldest_group_is_noticed_while_others_come_and_are_filtered(
    trainer: Callable[..., Trainer], broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots of groups that are filtered return at once, so outcomes never end; and the step waits for the oldest."""
    monkeypatch.setattr(source_module, "QUIET_S", 1.0)
    one, stop, lost = trainer(advantage={"name": "centered"}), StopFlag(), list[int]()

    def generate(tasks: TaskQueue, task_id: int, version: int) -> None:
        publish_of_version(tasks, task_id, version)
        if task_id == 0 and not lost:
            stream = broker.connection.keys.trajectories
            lost.append(broker.connection.client.xtrim(stream, maxlen=0, approximate=False))

    with Pipeline(broker, generate, lambda task_id, sample: Score(reward=float(sample) if task_id < 2 else 1.0)):
        thread, errors = in_thread(one, stop)
        until(lambda: one.progress.step >= 1, "step 1")
        stop.set()
        join(thread, errors)
    assert lost == [2]
    assert broker.ledger.read_state().balanced


def test_a_group_that_ends_while_it_is_examined_is_not_taken_for_damaged(
    trainer: Callable[..., Trainer], broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "QUIET_S", 0.1)
    one, stop = trainer(advantage={"name": "centered"}), StopFlag()
    real, rewards, due = one.session.diagnose_group, broker.score_queue("r"), list[Delivery[Trajectory]]()

    def diagnose(task_id: int) -> Diagnosis:
        """The scores come in just before the group is examined, and it teaches nothing."""
        rewards.publish([(due.pop(), Score(reward=1.0)) for _ in range(len(due))])
        return real(task_id)

    monkeypatch.setattr(one.session, "diagnose_group", diagnose)
    thread, errors = in_thread(one, stop)
    task = Task(task_id=0, kind="train", n=2, sampling=Sampling(), text="?")
    until(lambda: broker.ledger.admit(task).answer == "ok", "room")
    publish_of_version(broker.task_queue("g"), 0, 0)
    due += rewards.read(10, 100)
    until(lambda: broker.ledger.read_state().dropped == {"zero_variance": 1}, "the end of the group")
    stop.set()
    join(thread, errors)
    assert [
        event.text for event in [stored.event for stored in broker.events.newest(100)] if event.name == "broker_mended"
    ] == []


@pytest.mark.parametrize("lost", [("weights",), ("chunks",), ("weights", "chunks")])
def test_weights_that_vanish_while_all_wait_for_them_are_published_again(
    trainer: Callable[..., Trainer], broker: Broker, monkeypatch: pytest.MonkeyPatch, lost: tuple[str, ...]
) -> None:
    monkeypatch.setattr(source_module, "QUIET_S", 0.1)
    one, stop = trainer(publish={"transport": "redis"}), StopFlag()
    store, keys = broker.weights, broker.connection.keys
    thread, errors = in_thread(one, stop)
    until(lambda: store.newest() is not None, "the first version")
    # Without a generator the trainer waits for the one group that is admitted.
    broker.ledger.admit(Task(task_id=0, kind="train", n=2, sampling=Sampling(), text="?"))
    for _ in range(2):
        broker.connection.client.delete(*(getattr(keys, name) for name in lost))
        until(lambda: (newest := store.newest()) is not None and store.holds(newest), "the same version again")
    stop.set()
    join(thread, errors, 30)


def test_weights_that_vanish_during_the_last_evaluation_are_published_again(
    trainer: Callable[..., Trainer], broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "QUIET_S", 0.1)
    one, stop = trainer(steps=1, publish={"transport": "redis"}), StopFlag()
    store, keys = broker.weights, broker.connection.keys
    thread, errors = train_to_last_evaluation(one, broker, stop)
    until(lambda: (newest := store.newest()) is not None and newest.version == 1, "the last version")
    broker.connection.client.delete(keys.weights, keys.chunks)
    until(lambda: (newest := store.newest()) is not None and store.holds(newest), "the same version again")
    stop.set()
    join(thread, errors, 30)


@pytest.mark.parametrize("transport", ["file", "peer"])
def test_a_trainer_that_starts_beside_broken_keys_of_weights_mends_them(
    trainer: Callable[..., Trainer], broker: Broker, transport: str
) -> None:
    client, keys = broker.connection.client, broker.connection.keys
    for key in (keys.weights, keys.peers):
        client.set(key, "hello")
    one, stop = trainer(publish={"transport": transport}), StopFlag()
    thread, errors = in_thread(one, stop)
    until(lambda: client.type(keys.weights) == b"stream", "the first version")
    stop.set()
    join(thread, errors, 30)
