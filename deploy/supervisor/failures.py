"""Why a run failed: the service that failed first, not those that failed as a consequence.

Pure functions over what the supervisor saw and over a service's log.
"""

from __future__ import annotations

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
"""Signals that others send: nothing that a process wrote before says why they did."""
NOT_STARTED = frozenset({126, 127})
_OWN = re.compile(r"^tidemill: (.+)")
_PEACEFUL = re.compile(r"\b(DEBUG|INFO|WARNING)\b")
_ERROR_WORD = re.compile(r"\b(error|fatal|critical|cannot|failed)\b", re.IGNORECASE)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class ServiceFailure:
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


def root_cause(unrecovered: Iterable[ServiceFailure]) -> ServiceFailure | None:
    """The earliest of the failures that services have not recovered from; at one moment, the one started first.

    But first of all the one that found that everything of the run fails: what fails for that reason may do so earlier.
    """

    def order(failure: ServiceFailure) -> tuple[bool, float, int]:
        return failure.exit.code != RUN_FAILED_EXIT, failure.time, failure.rank

    return min(unrecovered, key=order, default=None)


def last_error(log: Path, start: int = 0, code: int = ERROR_EXIT) -> str:
    """The line of a log that says why its process ended, "" if none does; looks at what came after byte ``start``.

    An error record of a JSON log, else an exception's line, else what the command itself complained of, else a line
    that speaks of an error; where no restart helps the command's complaint comes first. The very last line, of
    whatever kind, counts only for a program that could not be started or crashed in native code: of others it only
    tells what they did before. A process that was killed from outside did not know why.
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
            found = find(line)
            if found:
                return found[:500]
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
    match = _EXCEPTION.match(line.lstrip("| +-"))
    return match.group(0) if match else ""


def _own(line: str) -> str:
    match = _OWN.match(line)
    return match.group(1) if match else ""


def _wording(line: str) -> str:
    return line if _ERROR_WORD.search(line) and _is_prose(line) else ""


def _is_prose(line: str) -> bool:
    """Whether it is no record of a log, neither JSON nor that of a library with its level."""
    return not line.startswith("{") and not _PEACEFUL.search(line)
