"""The trainer's own log of what it did, on disk: metrics.jsonl for people, trained.jsonl as evidence.

A step that is replayed after a crash appears again; its last line is the one of the surviving weights. A line
``resumed`` says that a trainer (``epoch``) went on from that step: later steps written before are void, and so is
everything that an older epoch writes after it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from consumers.trainer.source import Batch
from schemas.errors import InfraError


class RunLog:
    """Appends one line a step to each file, flushed at once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._metrics = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._trained = (folder / "trained.jsonl").open("a", encoding="utf-8")

    def resumed(self, step: int, epoch: str) -> None:
        """This trainer goes on from weights with ``step`` steps in them."""
        self._line(self._trained, {"resumed": step, "epoch": epoch})

    def trained(self, batch: Batch, epoch: str) -> None:
        """These samples are in the weights now."""
        samples = [
            [group.task_id, member.sample]
            for group in batch.record.groups
            for member in group.members
            if member.trajectory_id
        ]
        line = {"step": batch.record.step, "epoch": epoch, "samples": samples, "excluded": batch.excluded}
        self._line(self._trained, line)

    def metrics(self, line: dict[str, Any]) -> None:
        """The figures of one finished step."""
        self._line(self._metrics, line)

    def _line(self, file: Any, data: dict[str, Any]) -> None:
        try:
            file.write(json.dumps(data) + "\n")
            file.flush()
        except OSError as error:
            raise InfraError(f"cannot write {file.name}: {error}") from error

    def close(self) -> None:
        self._metrics.close()
        self._trained.close()
