"""The trainer's pause, and what an older version has written: refused in one line."""

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from broker.flow.progress import Progress
from broker.flow.run_control import ControlState
from consumers.trainer import context as context_module
from consumers.trainer import pause as pause_module
from consumers.trainer.checkpoint.batch_files import BatchFiles
from consumers.trainer.checkpoint.store import CheckpointStore
from consumers.trainer.context import DiskRetry, TrainerContext
from consumers.trainer.metrics.timing import StepTimer
from consumers.trainer.pause import PauseFollower
from schemas.errors import ConfigError
from schemas.system.files import atomic_write


class Follower(PauseFollower):
    """Of a trainer without a broker; ``saves`` counts the checkpoints that were wanted."""

    def __init__(self, folder: Path) -> None:
        store = SimpleNamespace(checkpoint_store=SimpleNamespace(folder=folder))
        self.progress = Progress()
        self.saves = 0
        self.told: list[str] = []
        retry = DiskRetry(30.0, lambda *event: self.told.append(event[2]))
        settings = SimpleNamespace(follow=lambda changed: None)
        others = {"retry": retry, "settings": settings, "timer": StepTimer()}
        context = SimpleNamespace(broker=None, progress=self.progress, rank_group=store, **others)
        super().__init__(cast(TrainerContext, context), self.count_save)

    def count_save(self) -> None:
        self.saves += 1


def test_a_pause_lasts_until_no_reason_is_left(tmp_path: Path) -> None:
    pause = Follower(tmp_path)
    pause.reasons = pause.reasons | {"device in use"}
    assert pause.follow(ControlState("freeze", 1))
    assert pause.reasons == {"device in use", "ordered"}
    assert pause.follow(ControlState("none", 2)), "another process has the device"
    assert pause.acknowledged == {"pause": 2}
    pause.reasons = pause.reasons - {"device in use"}
    assert not pause.follow(ControlState("none", 2))


def test_a_drain_is_acknowledged_with_a_checkpoint_and_when_nothing_is_left(tmp_path: Path) -> None:
    pause = Follower(tmp_path)
    assert not pause.follow(ControlState("drain", 1))
    assert (pause.acknowledged, pause.saves) == ({}, 0)
    assert pause.follow(ControlState("drain", 1), drained=True)
    assert (pause.acknowledged, pause.saves) == ({"pause": 1}, 1)
    assert pause.follow(ControlState("drain", 1)), "nothing is admitted, so it stays drained"
    assert pause.saves == 1


def test_a_pause_is_remembered_for_a_broker_that_forgot_it(tmp_path: Path) -> None:
    Follower(tmp_path).follow(ControlState("freeze", 7, "ada", 12.0))
    later = Follower(tmp_path)
    later.restore()
    progress = later.progress
    assert (progress.pause, progress.pause_id, progress.pause_by, progress.pause_since) == ("freeze", 7, "ada", 12)


def test_a_checkpoint_order_is_followed_once(tmp_path: Path) -> None:
    pause = Follower(tmp_path)
    for _ in range(2):
        pause.follow(ControlState(checkpoint=3))
    assert (pause.saves, pause.acknowledged["checkpoint"]) == (1, 3)


def test_a_pause_that_finds_no_room_on_the_disk_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[int] = []

    def full(file: Path, content: str, *, durable: bool) -> None:
        if len(failures) < 2:
            failures.append(1)
            raise OSError(errno.ENOSPC, "No space left on device")
        atomic_write(file, content, durable=durable)

    monkeypatch.setattr(pause_module, "atomic_write", full)
    monkeypatch.setattr(context_module, "FIRST_WAIT_S", 0.01)
    pause = Follower(tmp_path)
    assert pause.follow(ControlState("freeze", 7))
    assert pause.acknowledged == {"pause": 7}
    assert ["No space" in text for text in pause.told] == [True, True]
    assert (tmp_path / "PAUSE").exists()


@pytest.mark.parametrize("name", ["step-00000100-e0003", "EPOCH"])
def test_checkpoints_of_an_older_version_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    checkpoints = CheckpointStore(tmp_path)
    for look in (checkpoints.newest, checkpoints.at, checkpoints.steps):
        with pytest.raises(ConfigError, match=f"{tmp_path} holds {name}.*move the folder away") as error:
            look()
        assert "\n" not in str(error.value)


def test_batches_of_an_older_version_are_refused(tmp_path: Path) -> None:
    folder = BatchFiles(tmp_path).folder
    folder.mkdir()
    (folder / "step-00000002-e0001.msgpack.zst").touch()
    with pytest.raises(ConfigError, match=f"{folder} holds step-00000002-e0001"):
        BatchFiles(tmp_path)


def test_names_of_today_are_read(tmp_path: Path) -> None:
    (tmp_path / "step-00000100-t0003").mkdir()
    (tmp_path / "LEADER_TERM").touch()
    assert CheckpointStore(tmp_path).steps() == [100]
