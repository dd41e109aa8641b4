"""Folders of checkpoints and models, which get their names last, when all files are on the disk.

A marker with the size and digest of every file completes a checkpoint: ``damage`` says what has changed since.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blake3 import blake3

from schemas.errors import ConfigError
from schemas.system.files import atomic_folder, commit_folder

MARKER = "COMPLETE"
THREADS = 8
_NOTED = ".digests-"
_OLDER = re.compile(r"step-\d{8,}-e\d{4,}(\.msgpack\.zst)?|EPOCH")


def damage(path: Path) -> str | None:
    """Say what is wrong with a checkpoint folder, whose files must have their sizes and digests; None if nothing."""
    try:
        marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
        listed: dict[str, list[Any]] = marker["files"]
    except FileNotFoundError:
        return f"no {MARKER} marker"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"unreadable {MARKER} marker ({error})"
    for name, (size, _) in listed.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
    digests = _digests([path / name for name in listed], _blake3 if "digest" in marker else _blake2b)
    changed = [name for (name, (_, digest)), now in zip(listed.items(), digests, strict=True) if now != digest]
    return f"{changed[0]} has changed since it was written" if changed else None


def note_digests(aside: Path, rank: int, files: Sequence[Path]) -> None:
    """Leave the digests of files that this rank has written to the folder ``aside``, for ``complete``."""
    names = [str(file.relative_to(aside)) for file in files]
    write_json(aside / f"{_NOTED}{rank}", dict(zip(names, _digests(files), strict=True)))


def complete(aside: Path, path: Path) -> None:
    """Write the marker into the folder ``aside``, and rename it to ``path`` once all of it is on the disk.

    Only files whose digest no rank has noted are read.
    """
    known: dict[str, str] = {}
    for noted in aside.glob(f"{_NOTED}*"):
        known |= json.loads(noted.read_text(encoding="utf-8"))
        noted.unlink()
    files = {str(p.relative_to(aside)): p for p in sorted(aside.rglob("*")) if p.is_file()}
    rest = [name for name in files if name not in known]
    known |= dict(zip(rest, _digests([files[name] for name in rest]), strict=True))
    listed = {name: [file.stat().st_size, known[name]] for name, file in files.items()}
    write_json(aside / MARKER, {"files": listed, "digest": "blake3"})
    commit_folder(aside, path)


def refuse_older_names(folder: Path) -> None:
    """Raise ConfigError if an older version wrote into ``folder``: its run must not restart from step 0 unnoticed."""
    older = sorted(path.name for path in folder.glob("*") if _OLDER.fullmatch(path.name))
    if older:
        raise ConfigError(
            f"{folder} holds {older[0]}, which an older version of Tidemill has written and this one cannot read:"
            " finish the run with that version, or move the folder away to begin at step 0"
        )


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write JSON as text; equal contents make equal files."""
    file.write_text(json.dumps(content, sort_keys=True) + "\n", encoding="utf-8")


def _blake3(file: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest(length=16)


def _digests(files: Sequence[Path], digest: Callable[[Path], str] = _blake3) -> list[str]:
    """Return the digests of files, several at a time: hashing is what saving and loading of large models wait for."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="digest") as pool:
        return list(pool.map(digest, files))


def _blake2b(file: Path) -> str:
    """Return the digest of a marker that names none."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


@contextmanager
def whole_folder(out: Path, setting: str, *, main: bool = True) -> Iterator[Path]:
    """Yield a folder beside ``out`` to write to, which becomes ``out`` if the block succeeds, and is removed otherwise.

    main: whether this rank writes; the others get ``out`` itself, and must not write to it.
    ConfigError if ``out`` exists; setting: the part of the configuration that names it.
    """
    if not main:
        yield out
        return
    if out.exists():
        raise ConfigError(f"{out} exists already: remove it or name another {setting}")
    with atomic_folder(out) as aside:
        yield aside
