"""Atomic writes: files and folders are written under another name beside, then renamed.

A durable write survives a loss of power once the call has returned: the file is flushed to the disk before it is
renamed, and its folder after.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def atomic_write(file: Path, content: str | bytes, *, durable: bool = False, private: bool = False) -> None:
    """Replace ``file`` by one with this content (text as UTF-8), and make its folder if there is none.

    durable: whether to wait until the disk has it. private: only the owner may read it, also while it is written.
    OSError when the disk is full or may not be written; the old file then stays.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
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


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``folder`` that takes its name, durably, when the block ends without an error.

    After an error nothing is left of it. FileExistsError if ``folder`` exists at the start; OSError if it has come to
    exist since, unless it is empty.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists already")
    folder.parent.mkdir(parents=True, exist_ok=True)
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

    Both lie in the same parent folder. An old ``folder`` is renamed away first: after a crash in between there is none.
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
