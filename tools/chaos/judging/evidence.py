"""Evidence: what each process did, written by itself; the oracle's only source.

One file per process, one ``os.write`` per line in append mode: a line that was written survives a kill -9
of its writer, and no two writers share a file. Times are CLOCK_MONOTONIC, which all processes of one
machine share and which no fault of the suite moves.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, overload

from schemas.messages import Trajectory


class EvidenceWriter:
    """``write("publish", x=[...])`` appends ``{"at": ..., "k": "publish", "x": [...]}`` to NAME.PID.jsonl."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        file = folder / f"{name}.{os.getpid()}.jsonl"
        self.descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, kind: str, **data: Any) -> None:
        line = {"at": round(time.monotonic(), 4), "k": kind, **data}
        os.write(self.descriptor, json.dumps(line, separators=(",", ":")).encode() + b"\n")


@dataclass(frozen=True, slots=True)
class Line:
    """One line. at: seconds of the machine's monotonic clock. kind: see service.py. data: the other fields."""

    at: float
    kind: str
    data: dict[str, Any]


class Stored(Sequence[Line]):
    """The lines of a file, parsed each time they are walked through: an hour's logs would fill the memory."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __iter__(self) -> Iterator[Line]:
        return read_lines(self._file)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @overload
    def __getitem__(self, index: int) -> Line: ...
    @overload
    def __getitem__(self, index: slice) -> list[Line]: ...
    def __getitem__(self, index: int | slice) -> Line | list[Line]:
        return list(self)[index]


@dataclass(frozen=True)
class Log:
    """Everything that one process wrote, in order. process: ``NAME.PID``."""

    process: str
    lines: Sequence[Line]

    @property
    def name(self) -> str:
        """Name of the service."""
        return self.process.rpartition(".")[0]

    @property
    def role(self) -> str:
        """generator, reward, feeder or trainer."""
        return self.name.partition("-")[0]

    @cached_property
    def started(self) -> float:
        return next((line.at for line in self.lines), 0.0)


def read_lines(file: Path) -> Iterator[Line]:
    """The lines of one file. Only the last one can be torn, by a kill in mid-write; it is left out."""
    with file.open("rb") as stream:
        for raw in stream:
            if not raw.endswith(b"\n"):
                return
            data = json.loads(raw)
            yield Line(data.pop("at"), data.pop("k"), data)


def read_logs(folder: Path, role: str = "") -> list[Log]:
    """All logs of a folder, or those of one role, in the order in which the processes started."""
    logs = []
    for file in sorted(folder.glob(f"{role}*.jsonl")):
        # The trainers' are walked backwards and forwards, and are few.
        whole = file.name.startswith("trainer")
        logs.append(Log(file.stem, list(read_lines(file)) if whole else Stored(file)))
    return sorted((log for log in logs if log.started), key=lambda log: log.started)


def digest(trajectory: Trajectory) -> int:
    """64 bits over what was sampled, where and when: a sample that is made again has another one."""
    parts = repr((trajectory.generator, trajectory.seconds)).encode()
    content = hashlib.blake2b(parts, digest_size=8)
    content.update(trajectory.tokens.data)
    content.update(trajectory.logprobs.data)
    return int.from_bytes(content.digest(), "little")
