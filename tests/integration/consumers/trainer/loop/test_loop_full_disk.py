"""A disk without room: the trainer's loop waits with every write, reports it, and resumes."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.client import Broker
from broker.weights.transports import FileTransport
from consumers.trainer import context
from consumers.trainer import loop as loop_module
from consumers.trainer.checkpoint import store as checkpoints_module
from consumers.trainer.loop import Trainer
from consumers.trainer.model.hf_weights import copy_tokenizer
from consumers.trainer.model.snapshot import Snapshot
from schemas.config import ModelConfig
from schemas.errors import DiskError
from schemas.run_folder import read_lines, surviving_lines
from schemas.system.files import LineFile
from schemas.system.lifecycle import StopFlag
from tests.support.trainer.deterministic_run import Pipeline
from tests.support.trainer.trainer_loop import publish_of_version, run

pytestmark = pytest.mark.integration


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
    assert any(event.name == "checkpoint" and "No space" in event.text for event in broker.events.tail(10))


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
    with Pipeline(broker, publish_of_version):
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
    with Pipeline(broker, publish_of_version):
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
    with Pipeline(broker, publish_of_version):
        run(trainer(steps=1))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in folder.iterdir()}
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(".model")]


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
    with Pipeline(broker, publish_of_version), pytest.raises(DiskError, match="cannot publish weights version 1"):
        run(trainer(), stop)
    assert len(failures) == 2
