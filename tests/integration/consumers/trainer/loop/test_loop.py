"""The trainer's loop on a real server and a tiny real model, with text and with images."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from broker.client import Broker
from broker.flow.pipeline import Slot
from broker.queues.tasks import TaskQueue, eval_task_id
from consumers.trainer.checkpoint.batch_files import BatchFiles
from consumers.trainer.data.groups import Group
from consumers.trainer.group_intake import GroupIntake
from consumers.trainer.loop import Trainer
from consumers.trainer.step.build import build_train_step
from deploy.export.checkpoints import replay_steps
from deploy.offline.tiny_vision_model import write_tiny_vision_model
from schemas.config import TidemillConfig, parse_config
from schemas.images import ImageSettings, prepare_image, read_image_settings
from schemas.messages import ChatMessage, ContentPart, Sampling, Score, Task
from schemas.metric_names import describe
from schemas.run_folder import read_lines, surviving_lines
from schemas.system.lifecycle import StopFlag
from tests.support.broker.prompt_groups import make_task as make_eval_task
from tests.support.broker.prompt_groups import make_trajectory as make_eval_trajectory
from tests.support.trainer.deterministic_run import STEPS, Pipeline, make_config
from tests.support.trainer.trainer_loop import (
    in_thread,
    join,
    publish_of_version,
    run,
    train_to_last_evaluation,
    trained,
    until,
)
from tests.support.trainer.trajectories import make_trajectory
from tests.support.trainer.vision_steps import make_group


def every_other(task_id: int, sample: int) -> Score:
    """Every other prompt is always solved, so that its group has no spread of rewards."""
    right = 1.0 if task_id % 2 else float(sample)
    return Score(reward=right - 0.5, components={"exact": right, "length": -0.5})


def test_a_line_says_what_came_back_beside_what_was_trained(
    trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path
) -> None:
    with Pipeline(broker, publish_of_version, every_other):
        run(trainer(steps=4, advantage={"name": "centered"}))
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    complete = sum(line["groups/complete"] for line in lines)
    dropped = sum(line.get("groups/dropped_zero_variance", 0) for line in lines)
    solved = sum(line.get("groups/zero_variance_fraction", 0) * line["groups/complete"] for line in lines)
    assert dropped == solved == sum(line["groups/dropped"] for line in lines)
    assert 0 < dropped < complete
    for line in lines:
        assert line["reward/mean"] == 0.0, "of what was trained"
        assert line["samples/excluded"] == 0
        assert line["perf/tokens_per_s"] > 0
        assert line["train/length_min"] <= line["train/length_median"] <= line["train/length_p95"]
        assert 0 < line["train/ratio_min"] <= line["train/ratio_mean"]
        assert line["perf/tflops_per_device"] > 0
        assert [name for name in line if not describe(name)] == [], "in the table of the documentation"
    assert any(line.get("perf/generated_tokens_per_s", 0) > 0 for line in lines)
    came_back = [line for line in lines if line["groups/complete"]]  # A step may be of groups that came back before.
    assert came_back
    for line in came_back:
        share = line["groups/zero_variance_fraction"]
        assert line["reward/unfiltered_mean"] == pytest.approx(0.5 * share)
        assert (line["reward/exact/mean"], line["reward/exact/std"]) == (0.5, 0.5)
        assert (line["reward/length/mean"], line["reward/length/std"]) == (-0.5, 0.0)


def test_a_line_has_means_of_workflow_metrics(trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path) -> None:
    def generate(tasks: TaskQueue, task_id: int, version: int) -> None:
        samples = [make_trajectory(task_id, sample, version=version) for sample in range(2)]
        metrics: list[dict[str, float]] = [{"agents/calls": 3.0}, {"agents/calls": 6.0, "retries": 1.0}]
        tasks.publish(task_id, [replace(item, metrics=of) for item, of in zip(samples, metrics, strict=True)])

    with Pipeline(broker, generate):
        run(trainer(steps=2))
    for line in read_lines(tmp_path / "run" / "metrics.jsonl"):
        assert (line["episode/agents/calls"], line["episode/retries"]) == (4.5, 1.0)


def too_long(task_id: int, sample: int) -> Score:
    """Every other prompt is always solved, by one answer that is longer than it should be."""
    right, penalty = float(task_id % 2 or sample), -0.5 * sample
    return Score(reward=right + penalty, components={"exact": right, "length": penalty})


@pytest.mark.parametrize(("term", "kept"), [(None, {0, 1}), ("exact", {0})])
def test_groups_can_be_filtered_by_one_term_of_the_reward(
    trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path, term: str | None, kept: set[int]
) -> None:
    with Pipeline(broker, publish_of_version, too_long):
        run(trainer(steps=3, advantage={"name": "centered", "filter_term": term}))
    assert {task % 2 for task in trained(tmp_path)} == kept


def test_a_profile_and_where_the_time_went(trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path) -> None:
    with Pipeline(broker, publish_of_version):
        run(trainer(steps=3, profile_steps=[1], checkpoint={"every": 1}))
    (profile,) = (tmp_path / "run" / "profiles").iterdir()
    assert profile.name == "step-00000001"
    assert json.loads((profile / "rank-0.json").read_text())["traceEvents"]
    for line in read_lines(tmp_path / "run" / "metrics.jsonl"):
        times = {name: seconds for name, seconds in line.items() if name.startswith("time/")}
        total = times.pop("time/total_s")
        assert sum(times.values()) == pytest.approx(total)
        assert {"time/wait_s", "time/forward_s", "time/backward_s", "time/optimizer_s", "time/publish_s"} <= set(times)


@pytest.mark.parametrize(
    ("settings", "reason"), [({"least_std": 0.5}, "zero_variance"), ({"mean_between": [0.5, 1.0]}, "mean_reward")]
)
def test_a_group_that_teaches_too_little_gives_its_slot_back(
    trainer: Callable[..., Trainer], broker: Broker, settings: dict[str, Any], reason: str
) -> None:
    """Every group has the rewards 0 and 1 here."""
    one, stop = trainer(advantage={"name": "grpo", **settings}), StopFlag()
    with Pipeline(broker, publish_of_version):
        thread, errors = in_thread(one, stop)
        # More than there are slots: new prompts take their places.
        until(lambda: broker.ledger.read_state().dropped.get(reason, 0) > 60, "groups that are dropped")
        stop.set()
        thread.join(60)
    assert not errors
    assert one.progress.step == 0
    assert broker.ledger.read_state().balanced


def test_the_batch_changes_during_the_run(trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path) -> None:
    one = trainer(steps=6)
    with Pipeline(broker, publish_of_version):
        thread, errors = in_thread(one, StopFlag())
        until(lambda: one.progress.step >= 2, "step 2")
        assert broker.ledger.change_settings({"batch": 4})
        join(thread, errors)
    sizes = [
        len({task for task, _ in line["samples"]})
        for line in surviving_lines(read_lines(tmp_path / "run/trained.jsonl"))
    ]
    assert sizes[0] == 2
    assert sizes[-1] == 4
    assert broker.ledger.read_state().trained == sum(sizes)
    assert broker.ledger.read_state().balanced


def test_a_trainer_that_drops_stale_groups_stops_between_two_of_them(
    trainer: Callable[..., Trainer], broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop that waited for the last of many stale groups would be a kill, without a checkpoint."""
    stop, asked = StopFlag(), list[int]()

    def drop(intake: GroupIntake, task_ids: Sequence[int], staleness: int, quarantined: object) -> Iterator[Any]:
        stop.set()
        asked.append(len(task_ids))
        for task_id in task_ids:
            intake._end_group(task_id, intake._buffer.take(task_id), "stale")
        return iter(())

    with Pipeline(broker, publish_of_version):
        one = trainer()
        choose = GroupIntake.choose

        def wait_and_choose(intake: GroupIntake, active: Sequence[Slot], most: int) -> list[int]:
            until(lambda: bool(intake.claim()) or len(intake._buffer.waiting_ids()) >= 2 * most, "two batches")
            return choose(intake, active, most)

        monkeypatch.setattr(GroupIntake, "take", drop)
        monkeypatch.setattr(GroupIntake, "choose", wait_and_choose)
        thread, errors = in_thread(one, stop)
        join(thread, errors)
    assert len(asked) == 1, "no further group is dropped after the stop"


def test_learning_rate_steps_and_checkpoints_change_while_the_run_goes_on(
    trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path
) -> None:
    one = trainer(steps=500, optimizer={"lr": 1e-4}, checkpoint={"every": 400})
    with Pipeline(broker, publish_of_version):
        thread, errors = in_thread(one, StopFlag())
        until(lambda: one.progress.step >= 2, "step 2")
        assert broker.ledger.change_settings({"lr": 0.00025, "checkpoint_every": 1})
        until(lambda: one.checkpoints.step >= 3, "a checkpoint")
        last = one.progress.step + 3
        assert broker.ledger.change_settings({"steps": last})
        join(thread, errors)
    rates = [line["train/lr"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert (rates[0], rates[-1], len(rates)) == (1e-4, 0.00025, last)
    state = broker.ledger.read_state()
    assert (state.state, state.steps, state.step) == ("finished", last, last)
    assert state.settings == {"lr": 0.00025, "checkpoint_every": 1, "steps": last}
    assert state.balanced


def test_fewer_steps_end_a_waiting_trainer(trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path) -> None:
    one = trainer(steps=500)
    with Pipeline(broker, publish_of_version):
        thread, _ = in_thread(one, StopFlag())
        until(lambda: one.progress.step >= 2, "step 2")
        broker.run_control.pause("drain", "a test")
        until(lambda: bool(one.pause.reasons), "the pause")
        broker.ledger.change_settings({"steps": one.progress.step})
        broker.run_control.pause("none", "a test")
        thread.join(60)
    assert not thread.is_alive()
    assert broker.ledger.read_state().state == "finished"


def test_a_drain_holds_the_end_before_the_last_evaluation_only(trainer: Callable[..., Trainer], broker: Broker) -> None:
    one = trainer(steps=1)
    thread, errors = train_to_last_evaluation(one, broker, StopFlag())
    broker.run_control.pause("drain", "a test")
    until(lambda: one.pause.acknowledged.get("pause") == 1, "the drain")
    assert one.describe()[0] == "paused"
    broker.run_control.pause("none", "a test")
    until(lambda: not one.pause.reasons, "the end of the pause")
    task = make_eval_task(eval_task_id(1, 0), n=1, kind="eval")
    assert broker.evals.open(1, [task])
    broker.run_control.pause("drain", "a test")
    broker.task_queue("g").publish(task.task_id, [make_eval_trajectory(task.task_id, 0, "eval")])
    rewards = broker.score_queue("r")
    rewards.publish([(found, Score(reward=1.0)) for found in rewards.read(10, 100)])
    join(thread, errors)
    assert one.step_log.evaluations.lines[1]["scored"] == 1
    assert broker.ledger.read_state().state == "finished"


def test_a_marker_behind_a_cut_line_is_counted(trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path) -> None:
    with Pipeline(broker, publish_of_version):
        run(trainer(steps=2))
        with (tmp_path / "run" / "trained.jsonl").open("a") as file:
            file.write('{"step": 2, "sam')
        run(trainer(steps=3))
    lines = read_lines(tmp_path / "run" / "trained.jsonl")
    assert [line["resumed"] for line in lines if "resumed" in line] == [0, 2]
    assert len(list(surviving_lines(lines))) == 3


class Pictures:
    """Groups of a task's number, with one image each or two."""

    def __init__(self, settings: ImageSettings) -> None:
        self._settings = settings

    def group(self, task_id: int) -> Group:
        return make_group(task_id, [(60, 90), (30, 30)][: 1 + task_id % 2], self._settings)

    def task(self, task_id: int) -> tuple[Task, dict[str, bytes]]:
        files = self.group(task_id).images
        images = [prepare_image(body, self._settings)[0] for body in files.values()]
        message = ChatMessage("user", [*[ContentPart("image")] * len(images), ContentPart("text", "what?")])
        task = Task(task_id=task_id, kind="train", n=2, sampling=Sampling(), messages=[message], images=images)
        return task, dict(files)

    def generate(self, tasks: TaskQueue, task_id: int, version: int) -> None:
        tasks.publish(task_id, [trajectory for trajectory, _ in self.group(task_id).samples])


@pytest.fixture
def config(broker: Broker, tmp_path: Path) -> TidemillConfig:
    model = tmp_path / "model"
    write_tiny_vision_model(model)
    settings = make_config(tmp_path / "run", model, broker, record=True, checkpoint={"every": 2, "keep": 9})
    settings["model"] |= {"kind": "vision", "max_length": 256}
    return parse_config(settings)


def train(config: TidemillConfig, broker: Broker) -> None:
    torch.manual_seed(config.run.seed)
    Trainer(config, "trainer", broker, build_train_step(config)).run(StopFlag())


def test_recorded_steps_with_images_come_out_equal_without_the_broker(
    config: TidemillConfig, broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures = Pictures(read_image_settings(Path(config.model.path)))
    with Pipeline(broker, pictures.generate, make_task=pictures.task):
        train(config, broker)
    broker.purge()
    assert replay_steps(config, "", 2, None) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"equal: steps 2 to {STEPS - 1} of run ")
    assert "to the bit" in told
    batches = BatchFiles(config.folder)
    record = batches.read(3)
    group = record.groups[0]
    names = list(group.images)
    group.images[names[0]] = next(iter(pictures.group(100).images.values()))
    batches.write(record)
    assert replay_steps(config, "", 2, None) == 1, "another picture is another step"
    assert capsys.readouterr().out.startswith("NOT EQUAL")


def test_an_image_that_was_changed_after_generation_is_not_trained_on_and_its_group_is_made_again(
    config: TidemillConfig, broker: Broker, tmp_path: Path
) -> None:
    pictures = Pictures(read_image_settings(Path(config.model.path)))
    connection, changed = broker.connection, list[bytes]()

    def generate(tasks: TaskQueue, task_id: int, version: int) -> None:
        if task_id == 3 and not changed:
            (name, *_), other = pictures.group(3).images, next(iter(pictures.group(100).images.values()))
            connection.client.hset(connection.keys.images, name, other)
            changed.append(other)
        pictures.generate(tasks, task_id, version)

    with Pipeline(broker, generate, make_task=pictures.task):
        train(config, broker)
    assert changed
    assert any(event.name == "broker_mended" for event in [stored.event for stored in broker.events.newest(100)])
    assert trained(tmp_path) == dict.fromkeys(range(2 * STEPS), 1)
    trained_images = [
        body
        for step in range(STEPS)
        for group in BatchFiles(config.folder).read(step).groups
        for body in group.images.values()
    ]
    assert changed[0] not in trained_images
    assert not connection.client.exists(connection.keys.images)
