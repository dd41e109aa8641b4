"""The root cause of a failed run: the service that failed first, not those that failed as a consequence.

Pure functions over the exits that the supervisor saw and over a service's log.
"""

import json
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from deploy.supervisor.services import Exit
from schemas.errors import ERROR_EXIT, HOPELESS, RUN_FAILED_EXIT

TAIL_BYTES = 65536
_EXCEPTION = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure|Message)\b.*")
FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that other processes send. The log of a killed process does not say why."""
NOT_STARTED = frozenset({126, 127})
_OWN = "tidemill: "
_PEACEFUL = re.compile(r"\b(DEBUG|INFO|WARNING)\b")
_ERROR_WORD = re.compile(r"\b(error|fatal|critical|cannot|failed)\b", re.IGNORECASE)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class ServiceFailure:
    """An unexpected end of a service. ``rank``: its position in the order of starting."""

    service: str
    exit: Exit
    time: float
    rank: int
    line: str
    log: Path

    def __str__(self) -> str:
        reason = f": {self.line}" if self.line else ""
        log = f" [log: {self.log}]" if self.log.is_file() else ""
        return f"{self.service} failed ({self.exit}){reason}{log}"


def root_cause(unrecovered: Iterable[ServiceFailure]) -> ServiceFailure | None:
    """Return the earliest failure that no restart has mended; of two at one moment, that of the service started first.

    A service that found the whole run to fail comes before all others, since they may fail earlier for that reason.
    """

    def order(failure: ServiceFailure) -> tuple[bool, float, int]:
        return failure.exit.code != RUN_FAILED_EXIT, failure.time, failure.rank

    return min(unrecovered, key=order, default=None)


def last_error(log: Path, start: int = 0, code: int = ERROR_EXIT) -> str:
    """Return the line of a log, after byte ``start``, that says why its process ended, or "".

    An error record of a JSON log, else the line of an exception, else the command's own error, else a line with a word
    such as "error"; if no restart helps, the command's own error comes first. The last line, of any kind, counts only
    if the program could not be started or crashed in native code. A process that was killed from outside logs no
    reason.
    """
    if -code in FROM_OUTSIDE:
        return ""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(start, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in _COLOUR.sub("", text).splitlines() if line.strip()]
    finders = [_record, _exception, _own, _wording]
    if code in HOPELESS:
        finders.insert(0, _own)
    for find in finders:
        for line in reversed(lines):
            if reason := find(line):
                return reason[:500]
    has_last_words = code in NOT_STARTED or code < 0
    return lines[-1][:500] if lines and has_last_words and _is_prose(lines[-1]) else ""


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
    return match[0] if (match := _EXCEPTION.match(line.lstrip("| +-"))) else ""


def _own(line: str) -> str:
    return line.removeprefix(_OWN) if line.startswith(_OWN) else ""


def _wording(line: str) -> str:
    return line if _ERROR_WORD.search(line) and _is_prose(line) else ""


def _is_prose(line: str) -> bool:
    """Return whether the line is not a log record, neither JSON nor a library's with its level."""
    return not line.startswith("{") and not _PEACEFUL.search(line)
