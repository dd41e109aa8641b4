"""How far a trainer is: what its checkpoints hold beside tensors, and what a lost broker is rebuilt from.

Every prompt below ``cursor`` has been admitted once; of those, all but ``unfinished`` have ended. So the two
tell which prompts are in the weights or were given up, and which have to be made again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from broker.fence import incarnation
from broker.orders import Mode, Orders
from broker.training import FIRST_LINEAGE, Known, Look
from schemas.config import TidemillConfig
from schemas.errors import DiskError, FencedError
from schemas.messages import BatchRecord


@dataclass
class Progress:
    """step counts finished optimizer steps; version names the weights; trained and samples count what is in them."""

    step: int = 0
    version: int = 0
    lineage: str = FIRST_LINEAGE
    cursor: int = 0
    unfinished: set[int] = field(default_factory=set)
    trained: int = 0
    samples: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    settings: dict[str, int] = field(default_factory=dict)
    pause: Mode = "none"
    pause_id: int = 0
    pause_by: str = ""
    pause_since: int = 0
    started: str | None = None

    def saw(self, look: Look) -> None:
        """The pipeline as it is now."""
        self.cursor = look.cursor
        self.unfinished = look.unfinished
        self.counts = look.counts
        self.settings = look.settings
        self.heard(look.orders)

    def heard(self, orders: Orders) -> None:
        """What people asked for, which a rebuilt broker is told again."""
        self.pause, self.pause_id = orders.pause, orders.pause_id
        self.pause_by, self.pause_since = orders.by, int(orders.since)

    def will_do(self, records: Iterable[BatchRecord]) -> None:
        """Steps that are journaled but not in the weights."""
        self.unfinished.update(group.task_id for record in records for group in record.groups)

    def did(self, record: BatchRecord) -> None:
        """The weights now hold this step."""
        self.step = record.step + 1
        self.version = record.makes
        self.trained += len(record.groups)
        self.samples += sum(bool(member.trajectory_id) for group in record.groups for member in group.members)
        self.unfinished.difference_update(group.task_id for group in record.groups)

    def extra(self) -> dict[str, Any]:
        """For a checkpoint, as JSON; step and version are saved with the tensors."""
        left_out = ("step", "version")
        fields = {name: value for name, value in vars(self).items() if name not in left_out}
        return fields | {"unfinished": sorted(self.unfinished)}

    @classmethod
    def restored(cls, step: int, version: int, extra: dict[str, Any]) -> Progress:
        """From a checkpoint."""
        known = {name: value for name, value in extra.items() if name in cls.__dataclass_fields__}
        return cls(step=step, version=version, **(known | {"unfinished": set(known["unfinished"])}))

    def known(
        self, config: TidemillConfig, *, saved: int, epoch_floor: int, version_if_lost: int, fresh: bool
    ) -> Known:
        """For taking the run over."""
        return Known(
            epoch_floor=epoch_floor,
            lineage=self.lineage,
            step=self.step,
            saved=saved,
            version=self.version,
            version_if_lost=version_if_lost,
            cursor=self.cursor,
            unfinished=sorted(self.unfinished),
            trained=self.trained,
            counts=self.counts | {"samples_trained": self.samples},
            fresh=fresh,
            batch=config.trainer.batch_groups,
            staleness=config.flow.staleness,
            window=config.flow.window,
            steps=config.trainer.steps,
            every=config.trainer.checkpoint.every,
            settings=self.settings,
            pause=self.pause,
            pause_id=self.pause_id,
            pause_by=self.pause_by,
            pause_since=self.pause_since,
            started=self.started,
        )


@dataclass(frozen=True)
class Seen:
    """The newest trainer that used this folder: its epoch, and the highest version it may have published."""

    epoch: str
    version: int

    @property
    def number(self) -> int:
        return incarnation(self.epoch)


class Incarnation:
    """The file EPOCH beside the checkpoints: who the newest trainer is, also when the broker has forgotten it."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "EPOCH"

    def read(self) -> Seen | None:
        """None when there is none, or none that can be read."""
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
            return Seen(str(found["epoch"]), int(found["version"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, epoch: str, version: int, durable: bool = False) -> None:
        """Replace the file at once and whole; ``durable`` flushes it to the disk. DiskError if that is full.

        FencedError, and nothing is written, if another trainer has used the folder since ``epoch`` did.
        """
        self.check(epoch)
        aside = self._file.with_suffix(".writing")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with aside.open("w", encoding="utf-8") as stream:
                stream.write(json.dumps({"epoch": epoch, "version": version}))
                if durable:
                    stream.flush()
                    os.fsync(stream.fileno())
            os.replace(aside, self._file)
        except OSError as error:
            raise DiskError(f"cannot write {self._file}: {error}") from error

    def check(self, epoch: str) -> None:
        """FencedError if another trainer has used the folder since ``epoch`` did."""
        seen = self.read()
        if seen is not None and seen.epoch != epoch and seen.number >= incarnation(epoch):
            raise FencedError(f"trainer {epoch} was replaced by {seen.epoch} and stops")
