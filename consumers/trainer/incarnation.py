"""Who the newest trainer of a run is, in the file EPOCH beside the checkpoints: also when the broker has forgotten it.

And the highest version it may have published: a number that named weights names no others, even when they are lost.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from broker.fence import incarnation
from schemas.errors import DiskError, FencedError


@dataclass(frozen=True)
class Seen:
    """The newest trainer that used this folder: its epoch, and the highest version it may have published."""

    epoch: str
    version: int

    @property
    def number(self) -> int:
        return incarnation(self.epoch)


class Incarnation:
    """This trainer's ``epoch``, and ``floor``: the highest version that it or one before it may have published."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "EPOCH"
        self.epoch = "0-none"
        self.floor = 0

    @property
    def number(self) -> int:
        """Which trainer of the run this is."""
        return incarnation(self.epoch)

    def read(self) -> Seen | None:
        """What the file says; None when there is none, or none that can be read."""
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
            return Seen(str(found["epoch"]), int(found["version"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def begin(self, epoch: str, version: int) -> None:
        """From now on this trainer is ``epoch``; durable. Errors as of ``publishes``."""
        self.epoch = epoch
        self._raise(version, durable=True)

    def publishes(self, version: int) -> None:
        """Before a version may be seen by anybody. DiskError if the disk is full.

        FencedError, and nothing is written, if another trainer has used the folder since this one began.
        """
        self._raise(version, durable=False)

    def check(self) -> None:
        """FencedError if another trainer has used the folder since this one began."""
        seen = self.read()
        if seen is not None and seen.epoch != self.epoch and seen.number >= self.number:
            raise FencedError(f"trainer {self.epoch} was replaced by {seen.epoch} and stops")

    def _raise(self, version: int, durable: bool) -> None:
        self.check()
        self.floor = max(self.floor, version)
        aside = self._file.with_suffix(".writing")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with aside.open("w", encoding="utf-8") as stream:
                stream.write(json.dumps({"epoch": self.epoch, "version": self.floor}))
                if durable:
                    stream.flush()
                    os.fsync(stream.fileno())
            os.replace(aside, self._file)
        except OSError as error:
            raise DiskError(f"cannot write {self._file}: {error}") from error
