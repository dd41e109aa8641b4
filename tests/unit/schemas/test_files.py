"""Files and folders appear whole or not at all."""

import os
from pathlib import Path

import pytest

from schemas.files import atomic_folder, atomic_write, commit_folder


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("content", ["für alle", b"\x00\xff"])
def test_a_file_gets_its_content_and_nothing_else_is_left(tmp_path: Path, content: str | bytes, durable: bool) -> None:
    file = tmp_path / "new" / "state.json"
    atomic_write(file, "before")
    atomic_write(file, content, durable=durable)
    assert file.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert os.listdir(file.parent) == ["state.json"]


def test_a_private_file_is_its_owners_also_where_a_public_one_was_left_half_written(tmp_path: Path) -> None:
    (tmp_path / ".secret.writing").write_text("half")
    atomic_write(tmp_path / "secret", "password", private=True)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    atomic_write(file, "before")
    (tmp_path / ".state.json.writing").mkdir()
    with pytest.raises((IsADirectoryError, PermissionError)):
        atomic_write(file, "after")
    assert file.read_text() == "before"


def test_a_folder_appears_when_its_block_ends(tmp_path: Path) -> None:
    out = tmp_path / "models" / "tiny"
    with atomic_folder(out) as folder:
        (folder / "part").mkdir()
        (folder / "part" / "weights").write_text("1")
        assert not out.exists()
    assert (out / "part" / "weights").read_text() == "1"
    assert out.stat().st_mode & 0o777 == 0o755
    assert os.listdir(out.parent) == ["tiny"]


def test_a_folder_that_failed_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with atomic_folder(tmp_path / "model") as folder:
            (folder / "weights").write_text("1")
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        fail()
    assert not os.listdir(tmp_path)


def test_a_folder_that_exists_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(FileExistsError, match="model exists already"), atomic_folder(tmp_path / "model"):
        pytest.fail("the block was entered")


def test_a_committed_folder_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    for content in ("old", "new"):
        aside = tmp_path / "aside"
        aside.mkdir()
        (aside / "file").write_text(content)
        commit_folder(aside, tmp_path / "step-1")
    assert (tmp_path / "step-1" / "file").read_text() == "new"
    assert os.listdir(tmp_path) == ["step-1"]
