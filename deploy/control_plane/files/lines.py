"""Files of JSON lines that grow while they are read, also by other processes: each line is read once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LARGEST = 64 << 20
"""A line of more bytes is left out."""
TAIL = 64 * 1024
"""Bytes at the end of a file in which its newest whole line is looked for."""


class GrowingFile:
    """A file of lines; ``read`` gives those that came since the last call, with their place in the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._end = 0
        self._too_large = False
        """Whether the bytes at ``_end`` belong to a line that is left out."""
        self._identity: tuple[int, int] | None = None

    def read(self) -> Iterator[tuple[int, bytes]]:
        """New whole lines, each with the byte at which it begins. Nothing of a file that is gone.

        A file that was replaced or cut is read from its begin, after ``(-1, b"")``.
        """
        try:
            stream = self.path.open("rb")
        except OSError:
            return
        with stream:
            known = os.fstat(stream.fileno())
            if self._identity not in (None, (known.st_dev, known.st_ino)) or known.st_size < self._end:
                self._end, self._too_large = 0, False
                yield -1, b""
            self._identity = (known.st_dev, known.st_ino)
            stream.seek(self._end)
            while line := stream.readline(LARGEST):
                whole, left_out = line.endswith(b"\n"), self._too_large
                if not whole and not left_out and len(line) < LARGEST:
                    # It is being written.
                    return
                begin, self._end = self._end, self._end + len(line)
                self._too_large = not whole
                if whole and not left_out:
                    yield begin, line


def parse(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None for anything else, as what a crash has cut off."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_objects(file: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file of lines, those that cannot be read left out; nothing if it is not there."""
    for _, line in GrowingFile(file).read():
        if (found := parse(line)) is not None:
            yield found


def last_object(file: Path, name: str) -> dict[str, Any]:
    """The newest whole line with something called ``name``, near the end of the file; {} without one."""
    try:
        with file.open("rb") as lines:
            lines.seek(max(0, os.fstat(lines.fileno()).st_size - TAIL))
            tail = lines.read().splitlines()
    except OSError:
        return {}
    for line in reversed(tail):
        found = parse(line)
        if found is not None and name in found:
            return found
    return {}


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object of a whole file; {} if there is none."""
    try:
        return parse(file.read_bytes()) or {}
    except OSError:
        return {}
