"""The trainer's own log of what it did, on disk: metrics.jsonl for people, trained.jsonl as evidence.

A step that is replayed after a crash appears again; its last line is the one of the surviving weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from consumers.trainer.source import Batch


class RunLog:
    """Appends one line a step to each file, flushed at once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._metrics = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._trained = (folder / "trained.jsonl").open("a", encoding="utf-8")

    def step(self, batch: Batch, epoch: str, metrics: dict[str, Any]) -> None:
        """Write down one finished step."""
        samples = [
            [group.task_id, member.sample]
            for group in batch.record.groups
            for member in group.members
            if member.trajectory_id
        ]
        self._line(self._metrics, metrics)
        self._line(
            self._trained, {"step": batch.record.step, "epoch": epoch, "samples": samples, "excluded": batch.excluded}
        )

    def _line(self, file: Any, data: dict[str, Any]) -> None:
        file.write(json.dumps(data) + "\n")
        file.flush()

    def close(self) -> None:
        self._metrics.close()
        self._trained.close()
