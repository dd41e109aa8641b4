"""Files and folders appear whole or not at all, and lines too."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from schemas.system import files
from schemas.system.files import LineFile, atomic_folder, atomic_write, commit_folder


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


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Files cannot grow beyond ``size`` bytes in the block, as on a disk that is full: a write is cut off there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_line_that_finds_no_room_leaves_nothing_and_can_be_written_again(tmp_path: Path) -> None:
    lines = LineFile(tmp_path / "new" / "lines.jsonl")
    lines.append("first")
    with room_for(9), pytest.raises(OSError, match="File too large"):
        lines.append("second")
    assert lines.path.read_text() == "first\n"
    lines.append("second")
    lines.close()
    assert lines.path.read_text() == "first\nsecond\n"


def test_a_line_that_was_cut_off_swallows_none(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text('{"step": 35, "sam')
    lines = LineFile(file)
    lines.append("resumed")
    lines.append("more")
    assert file.read_text() == '{"step": 35, "sam\nresumed\nmore\n'


def test_what_another_process_wrote_behind_a_cut_line_is_not_taken_back(tmp_path: Path) -> None:
    ours, theirs = LineFile(tmp_path / "lines.jsonl"), LineFile(tmp_path / "lines.jsonl")
    ours.append("ours")
    theirs.append("theirs")
    real = os.write

    def write(handle: int, data: bytes) -> int:
        if data.startswith(b"second"):
            return real(handle, data[:3])
        os.write = real
        theirs.append("theirs")
        raise OSError(errno.ENOSPC, "No space left on device")

    os.write = write  # type: ignore[assignment]
    try:
        with pytest.raises(OSError, match="No space"):
            ours.append("second")
    finally:
        os.write = real
    ours.append("second")
    assert ours.path.read_text() == "ours\ntheirs\nsectheirs\n\nsecond\n"


def test_a_durable_write_flushes_the_names_of_new_folders_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[Path] = []
    monkeypatch.setattr(files, "fsync", flushed.append)
    atomic_write(tmp_path / "a" / "b" / "file", "content", durable=True)
    assert flushed == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
