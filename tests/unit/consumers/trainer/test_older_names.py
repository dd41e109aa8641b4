"""What an older version has written is refused in one line, and no run begins at step 0 beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from consumers.trainer.checkpoint.batch_files import BatchFiles
from consumers.trainer.checkpoint.store import CheckpointStore
from schemas.errors import ConfigError


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
