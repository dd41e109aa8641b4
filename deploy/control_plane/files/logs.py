"""Logs of a run's services: listed, and read a part at a time, from the end or from where the last part ended."""

import os
import stat
from contextlib import suppress
from pathlib import Path

from schemas.control_api.run_folders import LogHead, LogPart
from schemas.run_folder import LOGS

PART = 256 * 1024
"""Most bytes of a part."""


def list_logs(folder: Path) -> list[LogHead]:
    """Return the logs of a run, by name."""
    heads = []
    for file in sorted((folder / LOGS).glob("*.log")):
        with suppress(OSError):
            known = file.lstat()
            # A process that writes the folder could plant a link to a file that only this process can read.
            if stat.S_ISREG(known.st_mode):
                heads.append(LogHead(service=file.stem, bytes=known.st_size, updated=known.st_mtime))
    return heads


def read_log(folder: Path, service: str, after: int | None, most: int = PART) -> LogPart | None:
    """Return whole lines of a service's log after the byte ``after``, or its last ones; None if there is no such log.

    A log that is shorter than ``after`` was replaced, and is read from its begin.
    """
    if service not in {head.service for head in list_logs(folder)}:
        return None
    try:
        file = os.open(folder / LOGS / f"{service}.log", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(file, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            start = max(0, size - most) if after is None else after if after <= size else 0
            stream.seek(start)
            data = stream.read(most)
    except OSError:
        return None
    if after is None and start > 0:
        # It may begin within a line.
        cut = data.find(b"\n") + 1
        start, data = start + cut, data[cut:]
    end = data.rfind(b"\n") + 1 or (len(data) if len(data) == most else 0)
    lines = data[:end].decode(errors="replace").splitlines()
    return LogPart(service=service, start=start, end=start + end, bytes=size, lines=lines)
