"""Why a run failed: the service that failed first, not those that failed as a consequence.

Pure functions over what the supervisor saw and over a service's log.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from deploy.supervisor.services import Exit

TAIL_BYTES = 65536
_EXCEPTION = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure|Message)\b.*")
_ERROR_WORD = re.compile(r"\b(error|fatal|critical|cannot|failed)\b", re.IGNORECASE)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Failure:
    """The end of a service that nobody had asked to end. ``rank``: its place in the order of starting."""

    service: str
    exit: Exit
    time: float
    rank: int
    line: str
    log: Path

    def __str__(self) -> str:
        """A line that names the service, how it ended, its last words and its log."""
        reason = f": {self.line}" if self.line else ""
        log = f" [log: {self.log}]" if self.log.is_file() else ""
        return f"{self.service} failed ({self.exit}){reason}{log}"


def root_cause(unrecovered: Iterable[Failure]) -> Failure | None:
    """The earliest of the failures that services have not recovered from; at one moment, the one started first."""
    return min(unrecovered, key=lambda failure: (failure.time, failure.rank), default=None)


def last_error(log: Path, start: int = 0) -> str:
    """The line of a log that best says why its process ended; looks at what came after byte ``start``.

    An error record of a JSON log, else an exception's line, else a line that speaks of an error, else the
    last line that is no JSON record: a peaceful record only tells what it did before it was killed.
    """
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(start, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in _COLOUR.sub("", text).splitlines() if line.strip()]
    for find in (_record, _exception, _wording, _prose):
        for line in reversed(lines):
            found = find(line)
            if found:
                return found[:500]
    return ""


def _record(line: str) -> str:
    if not line.startswith("{"):
        return ""
    try:
        record = json.loads(line)
    except ValueError:
        return ""
    if record.get("level") not in ("error", "critical"):
        return ""
    trace = str(record.get("exception", "")).strip().splitlines()
    return f"{record.get('event', '')}: {trace[-1].strip()}" if trace else str(record.get("event", ""))


def _exception(line: str) -> str:
    # Exception groups draw a frame of bars around their parts.
    match = _EXCEPTION.match(line.lstrip("| +-"))
    return match.group(0) if match else ""


def _prose(line: str) -> str:
    return "" if line.startswith("{") else line


def _wording(line: str) -> str:
    return line if _ERROR_WORD.search(line) and not line.startswith("{") else ""
