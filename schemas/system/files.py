"""Atomic writes: files and folders are written under another name beside, then renamed; and files of whole lines.

A durable write survives a loss of power once the call has returned: the file is flushed to the disk before it is
renamed, and its folder after.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from schemas.errors import DiskError


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Raise DiskError, with ``what`` before the reason, for an OSError in the block."""
    try:
        yield
    except OSError as error:
        raise DiskError(f"{what}: {error}") from error


def remove_tree(folder: Path) -> str:
    """Remove a folder that a stranger has filled: of any depth, without following links, in 60 s at most.

    What can't be removed stays; returns the reason, "" if nothing is left.
    """
    try:
        subprocess.run(["rm", "-rf", "--", str(folder)], timeout=60, capture_output=True, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return ""


def atomic_write(file: Path, content: str | bytes, *, durable: bool = False, private: bool = False) -> None:
    """Replace ``file`` by one with this content (text as UTF-8), and make its folder if needed.

    durable: whether to wait until the disk has it. private: only the owner may read it, also while it is written.
    OSError when the disk is full or may not be written; the old file then stays.
    """
    make_folder(file.parent)
    aside = file.with_name(f".{file.name}.writing")
    aside.unlink(missing_ok=True)
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if private else 0o666), "wb") as stream:
        stream.write(content.encode() if isinstance(content, str) else content)
        if durable:
            stream.flush()
            os.fsync(stream.fileno())
    aside.replace(file)
    if durable:
        fsync(file.parent)


def cut_log(file: Path, most: int) -> bool:
    """If a log has more than ``most`` bytes, keep its newest quarter under NAME.1, and empty it; whether that was so.

    Processes that append to it continue to. What is written between copying and emptying is lost.
    """
    try:
        size = file.stat().st_size
        if size <= most:
            return False
        with file.open("rb") as stream:
            stream.seek(size - most // 4)
            stream.readline()
            newest = stream.read()
        atomic_write(file.with_name(f"{file.name}.1"), newest)
        os.truncate(file, 0)
    except OSError:
        return False
    return True


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``folder`` that takes its name, durably, when the block ends without an error.

    After an error nothing is left of it. FileExistsError if ``folder`` exists at the start; OSError if it has come to
    exist since, unless it is empty.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists already")
    make_folder(folder.parent)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield aside
        aside.chmod(0o755)
        fsync_tree(aside)
        aside.rename(folder)
        fsync(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def commit_folder(aside: Path, folder: Path) -> None:
    """Flush ``aside`` and all in it to the disk, then rename it to ``folder``, in place of one that is there.

    Both lie in the same parent folder. An old ``folder`` is renamed away first; a crash in between leaves none.
    """
    fsync_tree(aside)
    if folder.exists():
        replaced = folder.with_name(f".{folder.name}.removing")
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
        aside.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        aside.rename(folder)
    fsync(folder.parent)


class LineFile:
    """A file that grows by whole lines, whatever is cut off in between; it is opened by the first ``append``.

    A line that a crash has cut off is ended there, so that it swallows no later one. What a full disk has cut off is
    taken back, unless another process has written behind it.
    """

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        """durable: whether each line is on the disk, also after a loss of power, when ``append`` returns."""
        self.path = path
        self._durable = durable
        self._handle: int | None = None
        self._cut = False

    def append(self, line: str) -> None:
        """Write a line, without its end. OSError when the disk is full: nothing of it is there then."""
        if self._handle is None:
            self._handle = self._open()
        data = (b"\n" if self._cut else b"") + line.encode() + b"\n"
        written = 0
        try:
            while written < len(data):
                written += os.write(self._handle, data[written:])
            if self._durable:
                os.fsync(self._handle)
        except OSError:
            self._take_back(self._handle, written)
            raise
        self._cut = False

    def close(self) -> None:
        """Close the file, if one is open."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _open(self) -> int:
        make_folder(self.path.parent)
        new = not self.path.exists()
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        end = os.fstat(handle).st_size
        self._cut = end > 0 and os.pread(handle, 1, end - 1) != b"\n"
        if new and self._durable:
            fsync(self.path.parent)
        return handle

    def _take_back(self, handle: int, written: int) -> None:
        """Cut off the last ``written`` bytes, which end where this process wrote last, or at least end their line."""
        if not written:
            return
        end = os.lseek(handle, 0, os.SEEK_CUR)
        try:
            if os.fstat(handle).st_size == end:
                os.ftruncate(handle, end - written)
                return
        except OSError:
            # The line is ended with the next one.
            pass
        self._cut = True


def make_folder(folder: Path) -> None:
    """Make a folder, with those above it, and flush the names of the new ones to the disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        fsync(path.parent)


def fsync_tree(folder: Path) -> None:
    """Flush every file in a folder, every folder in it, and the folder itself to the disk."""
    for path in (*folder.rglob("*"), folder):
        fsync(path)


def fsync(path: Path) -> None:
    """Flush one file, or one folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
