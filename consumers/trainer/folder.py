"""A model folder that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from schemas.errors import ConfigError


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


def _sync(path: Path) -> None:
    """Flush a file or folder to disk, so that the rename never names half-written ones."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
