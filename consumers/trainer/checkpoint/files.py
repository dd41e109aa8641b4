"""A folder of files that counts only when it is whole: sealed by a marker with the size and digest of every file.

It gets its name last, when all of it is on the disk.

A model folder that appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from schemas.errors import ConfigError

MARKER = "COMPLETE"
_OLDER = re.compile(r"step-\d{8,}-e\d{4,}(\.msgpack\.zst)?|EPOCH")


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint folder, None if nothing: every file must have its size and digest."""
    try:
        listed: dict[str, list[Any]] = json.loads((path / MARKER).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        return f"no {MARKER} marker"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"unreadable {MARKER} marker ({error})"
    for name, (size, digest) in listed.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
        if _digest(file) != digest:
            return f"{name} has changed since it was written"
    return None


def complete(aside: Path, path: Path) -> None:
    """Flush all files, then the marker, then give the folder its name."""
    files = sorted(p for p in aside.rglob("*") if p.is_file())
    listed = {str(p.relative_to(aside)): [p.stat().st_size, _digest(p)] for p in files}
    for file in files:
        _sync(file)
    write_json(aside / MARKER, {"files": listed})
    _sync(aside / MARKER)
    for folder in {p.parent for p in files}:
        _sync(folder)
    if path.exists():
        replaced = path.with_name(f".{path.name}.removing")
        shutil.rmtree(replaced, ignore_errors=True)
        path.rename(replaced)
        aside.rename(path)
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        aside.rename(path)
    _sync(path.parent)


def refuse_older_names(folder: Path) -> None:
    """ConfigError if a folder holds what an older version has written: nobody may begin anew beside it unawares."""
    older = sorted(path.name for path in folder.glob("*") if _OLDER.fullmatch(path.name))
    if older:
        raise ConfigError(
            f"{folder} holds {older[0]}, which an older version of Tidemill has written and this one cannot read:"
            " finish the run with that version, or move the folder away to begin at step 0"
        )


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Readable, and the same for the same content."""
    file.write_text(json.dumps(content, sort_keys=True) + "\n", encoding="utf-8")


def _digest(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def whole_folder(out: Path, setting: str) -> Iterator[Path]:
    """A folder beside ``out`` to write to, which becomes ``out`` when the block ends well, and is removed otherwise.

    ConfigError if ``out`` exists; setting: what names it in the configuration.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already: remove it or name another {setting}")
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield aside
        aside.chmod(0o755)
        for path in [*aside.iterdir(), aside]:
            _sync(path)
        aside.rename(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
