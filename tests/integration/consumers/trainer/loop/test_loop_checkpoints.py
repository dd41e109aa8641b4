"""The trainer's loop saves: checkpoints beside the training, asked for or cut short, and a disk without room."""

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.client import Broker
from broker.weights.transports import FileTransport
from consumers.trainer import context
from consumers.trainer import loop as loop_module
from consumers.trainer.checkpoint import store as checkpoints_module
from consumers.trainer.checkpoint.store import CheckpointStore, Taken
from consumers.trainer.loop import Trainer
from consumers.trainer.model import file_layout
from consumers.trainer.model.hf_weights import copy_tokenizer
from schemas.config import ModelConfig
from schemas.errors import ConfigError, DiskError
from schemas.run_folder import read_lines, surviving_lines
from schemas.system.files import LineFile
from schemas.system.lifecycle import StopFlag
from tests.support.trainer.deterministic_run import Pipeline
from tests.support.trainer.trainer_loop import in_thread, join, publish_of_version, run, trained, until

SAMPLING = {"n": 1, "temperature": 0.0, "max_tokens": 16}


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
    with Pipeline(broker, publish_of_version):
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


def test_training_goes_on_while_a_checkpoint_is_written_and_nothing_is_forgotten_before_it_is(
    trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, go = checkpoints_module.complete, threading.Event()

    def complete(*args: Path) -> None:
        assert go.wait(60)
        real(*args)

    monkeypatch.setattr(checkpoints_module, "complete", complete)
    one = trainer(steps=12, checkpoint={"every": 3})
    with Pipeline(broker, publish_of_version):
        thread, errors = in_thread(one, StopFlag())
        until(lambda: broker.ledger.read_state().step == 6, "six steps")
        # The next checkpoint waits for this one.
        time.sleep(0.3)
        state = broker.ledger.read_state()
        assert (state.step, state.uncommitted_steps) == (6, 6)
        assert state.live_groups <= state.live_bound
        assert not CheckpointStore(tmp_path / "run" / "checkpoints").steps()
        go.set()
        join(thread, errors)
    assert broker.ledger.read_state().uncommitted_steps == 0
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps() == [9, 12]


def test_a_checkpoint_that_was_asked_for_is_told_of_when_it_is_durable(
    trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, durable = checkpoints_module.complete, list[bool]()

    def complete(aside: Path, path: Path) -> None:
        durable.append(
            any(event.name == "checkpoint" for event in [stored.event for stored in broker.events.newest(10)])
        )
        real(aside, path)

    monkeypatch.setattr(checkpoints_module, "complete", complete)
    one = trainer(steps=6, checkpoint={"every": 4})
    with Pipeline(broker, publish_of_version):
        thread, errors = in_thread(one, StopFlag())
        until(lambda: one.progress.step >= 1, "step 1")
        assert broker.run_control.checkpoint("test")
        join(thread, errors)
    assert not durable[0], "not before"
    assert any(
        "a checkpoint covers step" in event.text for event in [stored.event for stored in broker.events.newest(10)]
    )


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
    with Pipeline(broker, publish_of_version):
        run(one)
    assert len(failures) == 2
    assert one.progress.step == 3
    assert any(
        event.name == "checkpoint" and "No space" in event.text
        for event in [stored.event for stored in broker.events.newest(10)]
    )


@pytest.mark.parametrize("place", ["write_pieces", "put"])
def test_training_waits_while_weights_find_no_room(
    trainer: Callable[..., Trainer], broker: Broker, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    failures: list[int] = []
    owner: Any = {"write_pieces": file_layout, "put": FileTransport}[place]
    real = getattr(owner, place)

    def full(*args: Any, **kwargs: Any) -> Any:
        if len(failures) < 2:
            failures.append(1)
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, place, full)
    monkeypatch.setattr(context, "FIRST_WAIT_S", 0.01)
    one = trainer(steps=3)
    with Pipeline(broker, publish_of_version):
        run(one)
    assert len(failures) == 2
    assert one.progress.step == 3
    newest = broker.weights.newest()
    assert newest is not None
    assert newest.version == 3
    assert broker.weights.holds(newest)
    assert any(
        event.name == "weights" and "No space" in event.text
        for event in [stored.event for stored in broker.events.newest(10)]
    )


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
    with Pipeline(broker, publish_of_version):
        run(one)
    assert one.progress.step == 3
    assert [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]
    assert len(list(surviving_lines(read_lines(tmp_path / "run" / "trained.jsonl")))) == 3
    assert any(
        event.name == "log" and "No space" in event.text
        for event in [stored.event for stored in broker.events.newest(10)]
    )


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
    with Pipeline(broker, publish_of_version):
        run(trainer(steps=1))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in folder.iterdir()}
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(".model")]


def test_a_trainer_that_waits_for_room_for_weights_ends_when_asked(
    trainer: Callable[..., Trainer], broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first version that found no room is reported by the next one, which is waited for."""
    stop, failures = StopFlag(), []

    def full(*_: Any, **__: Any) -> None:
        failures.append(1)
        if len(failures) == 2:
            stop.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file_layout, "write_pieces", full)
    monkeypatch.setattr(context, "FIRST_WAIT_S", 0.01)
    with Pipeline(broker, publish_of_version), pytest.raises(DiskError, match="cannot publish weights version 1"):
        run(trainer(), stop)
    assert len(failures) == 2


def evaluated(trainer: Trainer, means: dict[int, float]) -> Trainer:
    """Write complete evaluations of these versions, with their mean rewards."""
    for version, mean in means.items():
        line = {"version": version, "n": 1, "scored": 1, "failed": 0, "off_version": 0, "mean": mean, "length": 1.0}
        trainer.step_log.evaluations.add(line | {"accuracy": None, "time": 1.0, "wall_s": 1.0, "datasets": {}})
    return trainer


def test_checkpoints_of_the_best_evaluations_are_kept_beside_the_newest(
    trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path
) -> None:
    checkpoint = {"every": 100, "keep": 1, "keep_best": 2, "asynchronous": False}
    evaluation = {"dataset": {"name": "arithmetic"}, "sampling": SAMPLING, "every": 2}
    one = evaluated(trainer(evaluation=evaluation, checkpoint=checkpoint), {0: 0.95, 2: 0.9, 4: 0.1, 6: 0.2, 8: 0.15})
    with Pipeline(broker, publish_of_version):
        run(one)
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    assert store.steps() == [2, 6, 8]
    assert store.at("best").name.startswith("step-00000002")
    assert store.newest()[0] == store.at(8)


def test_a_run_whose_evaluations_get_no_better_ends_early_as_if_its_steps_were_done(
    trainer: Callable[..., Trainer], broker: Broker, tmp_path: Path
) -> None:
    evaluation = {"dataset": {"name": "arithmetic"}, "sampling": SAMPLING, "every": 1, "patience": 2}
    one = evaluated(trainer(evaluation=evaluation), {0: 0.5})
    finished = one.step_log.finished

    def trained_step(*args: Any) -> None:
        finished(*args)
        evaluated(one, {one.progress.version: 0.4})

    one.step_log.finished = trained_step  # type: ignore[method-assign]
    with Pipeline(broker, publish_of_version):
        run(one)
    assert one.progress.step == 2
    assert broker.ledger.read_state().state == "finished"
    (event,) = [event for event in [stored.event for stored in broker.events.newest(20)] if event.name == "early_stop"]
    assert "version 0, with a mean reward of 0.500" in event.text
    assert (tmp_path / "run" / "model" / "config.json").is_file()
    assert not broker.ledger.read_state().uncommitted_steps
