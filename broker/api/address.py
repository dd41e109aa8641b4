"""Where a run's control plane listens: a file in the run's folder, for those on the same machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import structlog

ADDRESS = "control.json"

log = structlog.get_logger()


def announce(folder: Path, url: str) -> None:
    """Say it; whoever may not write the folder just leaves no such file."""
    file = folder / ADDRESS
    try:
        folder.mkdir(parents=True, exist_ok=True)
        aside = file.with_suffix(".writing")
        aside.write_text(json.dumps({"url": url, "pid": os.getpid()}), encoding="utf-8")
        aside.replace(file)
    except OSError as error:
        log.warning("cannot say where the control plane listens", file=str(file), error=str(error))


def address_of(folder: Path) -> str | None:
    """The URL, with a slash at its end; None when nobody has said one."""
    try:
        found = json.loads((folder / ADDRESS).read_text(encoding="utf-8"))
        return str(found["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def withdraw(folder: Path, url: str) -> None:
    """It listens no more; another one's address stays."""
    if address_of(folder) == url:
        (folder / ADDRESS).unlink(missing_ok=True)
