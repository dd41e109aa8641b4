"""The trainer's loop on a real server and a tiny real model; a thread plays feeder, generator and reward service."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.client import Broker
from broker.weights.transports import FileTransport
from consumers.trainer import batch_source as source_module
from consumers.trainer import context
from consumers.trainer import loop as loop_module
from consumers.trainer.checkpoint import store as checkpoints_module
from consumers.trainer.checkpoint.store import CheckpointStore, Taken
from consumers.trainer.loop import Trainer
from consumers.trainer.model.hf_weights import copy_tokenizer
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.model.snapshot import Snapshot
from consumers.trainer.step.build import build_train_step
from deploy.run.summary import read_lines, surviving_lines
from schemas.config import DatasetConfig, EvalConfig, ModelConfig, TidemillConfig, parse_config
from schemas.errors import ConfigError, DiskError, FencedError
from schemas.files import LineFile
from schemas.lifecycle import StopFlag
from schemas.messages import Sampling, Score, Task, Trajectory
from tests.support.tiny_model import make_tiny_model
from tests.support.trajectories import make_trajectory

pytestmark = pytest.mark.integration


class Rest:
    """Everything but the trainer, in one thread."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._stop = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Rest:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.thread.join(20)
        assert not self.thread.is_alive()

    def _run(self) -> None:
        tasks, rewards = self._broker.task_queue("g"), self._broker.score_queue("r")
        following = 0
        while not self._stop.is_set():
            task = Task(task_id=following, kind="train", n=2, sampling=Sampling(), text="?")
            admission = self._broker.ledger.admit(task)
            following = admission.next
            for delivery in tasks.read(8, 5):
                version = delivery.version
                made = [make_trajectory(delivery.message.task_id, i, version=max(0, version - 1)) for i in range(2)]
                tasks.publish(delivery.message.task_id, made)
                tasks.release(delivery)
            rewards.publish([(item, self.score(item.message)) for item in rewards.read(64, 5)])

    def score(self, trajectory: Trajectory) -> Score:
        return Score(reward=float(trajectory.sample))


class EveryOther(Rest):
    """Every other prompt is always solved, so that its group has no spread of rewards."""

    def score(self, trajectory: Trajectory) -> Score:
        right = 1.0 if trajectory.task_id % 2 else float(trajectory.sample)
        return Score(reward=right - 0.5, components={"exact": right, "length": -0.5})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), hidden=32, layers=1)


@pytest.fixture
def trainer(model: Path, tmp_path: Path, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trainer]:
    monkeypatch.chdir(tmp_path)

    def make(**settings: Any) -> Trainer:
        trainer = {
            "steps": 8,
            "batch_groups": 2,
            "checkpoint": {"every": 3, "deadline_s": 30},
            "advantage": {"name": "raw"},
            "batch_timeout_s": 60,
            **settings,
        }
        config: TidemillConfig = parse_config(
            {
                "run": {"name": "loop", "folder": str(tmp_path / "run")},
                "model": {"path": str(model), "dtype": "float32", "max_length": 64},
                "train": {"name": "arithmetic"},
                "sampling": {"n": 2, "max_tokens": 16},
                "reward": {"terms": [{"name": "exact"}]},
                "flow": {"staleness": 20},
                "trainer": trainer,
            }
        )
        policy = Policy(load_model(config.model.path, "float32"))
        return Trainer(config, "trainer", broker, build_train_step(config, policy=policy))

    return make


def run(trainer: Trainer, stop: StopFlag | None = None) -> None:
    trainer.run(StopFlag() if stop is None else stop)


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def trained(folder: Path) -> Counter[int]:
    """How often each prompt is in the surviving weights."""
    lines = surviving_lines(read_lines(folder / "run" / "trained.jsonl"))
    return Counter(task for line in lines for task in {task for task, _ in line["samples"]})


def in_thread(trainer: Trainer, stop: StopFlag) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            trainer.run(stop)
        except (FencedError, RuntimeError) as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, errors


def test_a_line_says_what_came_back_beside_what_was_trained(
    trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path
) -> None:
    with EveryOther(broker):
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
    came_back = [line for line in lines if line["groups/complete"]]  # A step may be of groups that came back before.
    assert came_back
    for line in came_back:
        share = line["groups/zero_variance_fraction"]
        assert line["reward/unfiltered_mean"] == pytest.approx(0.5 * share)
        assert (line["reward/exact/mean"], line["reward/exact/std"]) == (0.5, 0.5)
        assert (line["reward/length/mean"], line["reward/length/std"]) == (-0.5, 0.0)


class TooLong(Rest):
    """Every other prompt is always solved, by one answer that is longer than it should be."""

    def score(self, trajectory: Trajectory) -> Score:
        right, penalty = float(trajectory.task_id % 2 or trajectory.sample), -0.5 * trajectory.sample
        return Score(reward=right + penalty, components={"exact": right, "length": penalty})


@pytest.mark.parametrize(("term", "kept"), [(None, {0, 1}), ("exact", {0})])
def test_groups_can_be_filtered_by_one_term_of_the_reward(
    trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path, term: str | None, kept: set[int]
) -> None:
    with TooLong(broker):
        run(trainer(steps=3, advantage={"name": "centered", "filter_term": term}))
    assert {task % 2 for task in trained(tmp_path)} == kept


def test_a_profile_and_where_the_time_went(trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path) -> None:
    with Rest(broker):
        run(trainer(steps=3, profile_steps=[1], checkpoint={"every": 1}))
    (profile,) = (tmp_path / "run" / "profiles").iterdir()
    assert profile.name == "step-00000001"
    assert json.loads((profile / "rank-0.json").read_text())["traceEvents"]
    for line in read_lines(tmp_path / "run" / "metrics.jsonl"):
        times = {name: seconds for name, seconds in line.items() if name.startswith("time/")}
        total = times.pop("time/total_s")
        assert sum(times.values()) == pytest.approx(total)
        assert {"time/wait_s", "time/forward_s", "time/backward_s", "time/optimizer_s", "time/publish_s"} <= set(times)


def test_a_wiped_broker_is_mended_while_the_trainer_goes_on(
    trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path
) -> None:
    one = trainer(steps=12)
    with Rest(broker):
        thread, errors = in_thread(one, StopFlag())
        for step in (2, 7):
            until(lambda step=step: one.progress.step >= step, f"step {step}")
            broker.purge()
        thread.join(90)
    assert not thread.is_alive()
    assert not errors
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
        with Rest(broker):
            thread, errors = in_thread(one, StopFlag())
            until(lambda one=one, last=last: one.progress.step >= last, f"step {last}")
            complete(0, 1.0)
            complete(last, 3.0)
            thread.join(60)
        assert not thread.is_alive()
        assert not errors
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
    with Rest(broker):
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


@pytest.mark.parametrize("older", ["checkpoints/step-00000003-e0001", "batches/step-00000001-e0001.msgpack.zst"])
def test_a_run_of_an_older_version_is_not_begun_anew(
    trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path, older: str
) -> None:
    (tmp_path / "run" / older).mkdir(parents=True)
    with pytest.raises(ConfigError, match=Path(older).name):
        run(trainer())
    assert broker.ledger.read_state().state == "starting"


def dying_at_checkpoint(monkeypatch: pytest.MonkeyPatch, before: bool) -> None:
    """The next checkpoint kills the trainer, before or after it is written."""
    real = CheckpointStore.write

    def write(self: CheckpointStore, taken: Taken) -> Path:
        monkeypatch.setattr(CheckpointStore, "write", real)
        if not before:
            real(self, taken)
        raise RuntimeError("killed")

    monkeypatch.setattr(CheckpointStore, "write", write)


def test_a_checkpoint_between_replays_does_not_claim_what_is_still_to_be_replayed(
    trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Rest(broker):
        dying_at_checkpoint(monkeypatch, before=True)
        with pytest.raises(RuntimeError, match="killed"):
            run(trainer(checkpoint={"every": 4, "asynchronous": False}))
        dying_at_checkpoint(monkeypatch, before=False)
        second = trainer(checkpoint={"every": 2, "asynchronous": False})
        with pytest.raises(RuntimeError, match="killed"):
            run(second)
        assert second.progress.step == 2, "two of four journaled steps were replayed"
        broker.purge()
        run(trainer(steps=8))
    assert set(trained(tmp_path).values()) == {1}
    assert set(trained(tmp_path)) == set(range(16)), "no prompt is skipped"


def test_training_waits_while_the_disk_is_full(
    trainer: Callable[..., Trainer], broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = checkpoints_module.complete, []

    def complete(*args: Path) -> None:
        if len(failures) < 2:
            failures.append(1)
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*args)

    monkeypatch.setattr(checkpoints_module, "complete", complete)
    one = trainer(steps=3)
    with Rest(broker):
        run(one)
    assert len(failures) == 2
    assert one.progress.step == 3
    assert any(event.name == "checkpoint" and "No space" in event.text for event in broker.events.tail(10))


def test_training_goes_on_while_a_checkpoint_is_written_and_nothing_is_forgotten_before_it_is(
    trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, go = checkpoints_module.complete, threading.Event()

    def complete(*args: Path) -> None:
        assert go.wait(60)
        real(*args)

    monkeypatch.setattr(checkpoints_module, "complete", complete)
    one = trainer(steps=12, checkpoint={"every": 3})
    with Rest(broker):
        thread, errors = in_thread(one, StopFlag())
        until(lambda: broker.ledger.read_state().step == 6, "six steps")
        # The next checkpoint waits for this one.
        time.sleep(0.3)
        state = broker.ledger.read_state()
        assert (state.step, state.uncommitted) == (6, 6)
        assert state.live_groups <= state.live_bound
        assert not CheckpointStore(tmp_path / "run" / "checkpoints").steps()
        go.set()
        thread.join(60)
    assert not thread.is_alive()
    assert not errors
    assert broker.ledger.read_state().uncommitted == 0
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps() == [9, 12]


def test_a_checkpoint_that_was_asked_for_is_told_of_when_it_is_durable(
    trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, durable = checkpoints_module.complete, list[bool]()

    def complete(aside: Path, path: Path) -> None:
        durable.append(any(event.name == "checkpoint" for event in broker.events.tail(10)))
        real(aside, path)

    monkeypatch.setattr(checkpoints_module, "complete", complete)
    one = trainer(steps=6, checkpoint={"every": 4})
    with Rest(broker):
        thread, errors = in_thread(one, StopFlag())
        until(lambda: one.progress.step >= 1, "step 1")
        assert broker.run_control.checkpoint("test")
        thread.join(60)
    assert not thread.is_alive()
    assert not errors
    assert not durable[0], "not before"
    assert any("a checkpoint covers step" in event.text for event in broker.events.tail(10))


@pytest.mark.parametrize(
    ("settings", "reason"), [({"least_std": 0.5}, "zero_variance"), ({"mean_between": [0.5, 1.0]}, "mean_reward")]
)
def test_a_group_that_teaches_too_little_gives_its_slot_back(
    trainer: Callable[..., Trainer], broker: Broker, settings: dict[str, Any], reason: str
) -> None:
    """Every group has the rewards 0 and 1 here."""
    one, stop = trainer(advantage={"name": "grpo", **settings}), StopFlag()
    with Rest(broker):
        thread, errors = in_thread(one, stop)
        # More than there are slots: new prompts take their places.
        until(lambda: broker.ledger.read_state().dropped.get(reason, 0) > 60, "groups that are dropped")
        stop.set()
        thread.join(60)
    assert not errors
    assert one.progress.step == 0
    assert broker.ledger.read_state().balanced


def test_the_batch_changes_while_the_run_goes_on(
    trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path
) -> None:
    one = trainer(steps=6)
    with Rest(broker):
        thread, errors = in_thread(one, StopFlag())
        until(lambda: one.progress.step >= 2, "step 2")
        assert broker.ledger.change_settings({"batch": 4})
        thread.join(60)
    assert not thread.is_alive()
    assert not errors
    sizes = [
        len({task for task, _ in line["samples"]})
        for line in surviving_lines(read_lines(tmp_path / "run/trained.jsonl"))
    ]
    assert sizes[0] == 2
    assert sizes[-1] == 4
    assert broker.ledger.read_state().trained == sum(sizes)
    assert broker.ledger.read_state().balanced


PARTS = ["ctl", "slots", "counts", "groups", "samples", "tasks", "trajectories", "scored", "journal"]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_the_broker_that_vanishes_stops_nothing_and_skips_nothing(
    trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(source_module, "QUIET_S", 0.2)
    one = trainer(steps=10)
    with Rest(broker):
        thread, errors = in_thread(one, StopFlag())
        until(lambda: one.progress.step >= 2, "step 2")
        broker.connection.client.delete(getattr(broker.connection.keys, part))
        thread.join(90)
    assert not thread.is_alive()
    assert not errors
    assert set(trained(tmp_path).values()) == {1}
    assert set(trained(tmp_path)) == set(range(20)), "no prompt is skipped"
    assert broker.ledger.read_state().balanced


@pytest.mark.parametrize("lost", [("weights",), ("chunks",), ("weights", "chunks")])
def test_weights_that_vanish_while_all_wait_for_them_are_published_again(
    trainer: Callable[..., Trainer], broker: Broker, monkeypatch: pytest.MonkeyPatch, lost: tuple[str, ...]
) -> None:
    monkeypatch.setattr(source_module, "QUIET_S", 0.1)
    one, stop = trainer(publish={"transport": "redis"}), StopFlag()
    store, keys = broker.weights, broker.connection.keys
    thread, errors = in_thread(one, stop)
    until(lambda: store.newest() is not None, "the first version")
    # Nobody generates: the trainer waits for the one group that is admitted.
    broker.ledger.admit(Task(task_id=0, kind="train", n=2, sampling=Sampling(), text="?"))
    for _ in range(2):
        broker.connection.client.delete(*(getattr(keys, name) for name in lost))
        until(lambda: (newest := store.newest()) is not None and store.holds(newest), "the same version again")
    stop.set()
    thread.join(30)
    assert not thread.is_alive()
    assert not errors


@pytest.mark.parametrize("place", ["write", "put"])
def test_training_waits_while_weights_find_no_room(
    trainer: Callable[..., Trainer], broker: Broker, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    failures: list[int] = []
    owner: Any = {"write": Snapshot, "put": FileTransport}[place]
    real = getattr(owner, place)

    def full(*args: Any, **kwargs: Any) -> Any:
        if len(failures) < 2:
            failures.append(1)
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, place, full)
    monkeypatch.setattr(context, "FIRST_WAIT_S", 0.01)
    one = trainer(steps=3)
    with Rest(broker):
        run(one)
    assert len(failures) == 2
    assert one.progress.step == 3
    newest = broker.weights.newest()
    assert newest is not None
    assert newest.version == 3
    assert broker.weights.holds(newest)
    assert any(event.name == "weights" and "No space" in event.text for event in broker.events.tail(10))


@pytest.mark.parametrize("name", ["metrics.jsonl", "trained.jsonl"])
def test_training_waits_while_its_log_finds_no_room(
    trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    failures: list[int] = []
    real = LineFile.append

    def full(self: LineFile, line: str) -> None:
        if self.path.name == name and len(failures) < 2:
            failures.append(1)
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, line)

    monkeypatch.setattr(LineFile, "append", full)
    monkeypatch.setattr(context, "FIRST_WAIT_S", 0.01)
    one = trainer(steps=3)
    with Rest(broker):
        run(one)
    assert one.progress.step == 3
    assert [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]
    assert len(surviving_lines(read_lines(tmp_path / "run" / "trained.jsonl"))) == 3
    assert any(event.name == "log" and "No space" in event.text for event in broker.events.tail(10))


def test_the_model_of_a_finished_run_appears_whole_also_on_a_full_disk(
    trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, failures = tmp_path / "run" / "model", []

    def full(model: ModelConfig, aside: Path) -> None:
        assert not folder.exists()
        assert (aside / "model.safetensors").exists()
        if len(failures) < 2:
            failures.append(1)
            raise OSError(errno.ENOSPC, "No space left on device")
        copy_tokenizer(model, aside)

    monkeypatch.setattr(loop_module, "copy_tokenizer", full)
    monkeypatch.setattr(context, "FIRST_WAIT_S", 0.01)
    with Rest(broker):
        run(trainer(steps=1))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in folder.iterdir()}
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(".model")]


def test_a_marker_behind_a_line_that_was_cut_off_is_not_swallowed(
    trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path
) -> None:
    with Rest(broker):
        run(trainer(steps=2))
        with (tmp_path / "run" / "trained.jsonl").open("a") as file:
            file.write('{"step": 2, "sam')
        run(trainer(steps=3))
    lines = read_lines(tmp_path / "run" / "trained.jsonl")
    assert [line["resumed"] for line in lines if "resumed" in line] == [0, 2]
    assert len(surviving_lines(lines)) == 3


def test_a_trainer_that_waits_for_room_for_weights_ends_when_asked(
    trainer: Callable[..., Trainer], broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first version that found no room is told of by the next one, which is waited for."""
    stop, failures = StopFlag(), []

    def full(*_: Any, **__: Any) -> None:
        failures.append(1)
        if len(failures) == 2:
            stop.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Snapshot, "write", full)
    monkeypatch.setattr(context, "FIRST_WAIT_S", 0.01)
    with Rest(broker), pytest.raises(DiskError, match="cannot publish weights version 1"):
        run(trainer(), stop)
    assert len(failures) == 2
