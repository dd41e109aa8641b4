"""The trainer's own log of what it did, on disk: metrics.jsonl for people, trained.jsonl as evidence.

A step that is replayed after a crash appears again; its last line is the one of the surviving weights. A line
``resumed`` says that a trainer (``leader_term``) went on from that step: later steps written before are void, and so is
everything that an older term writes after it.

What is written down of every step: the run's logs, its figures for people, and its batch where that is wanted.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from broker.client import Broker
from broker.flow.progress import Progress
from consumers.trainer.batch_source import Batch
from consumers.trainer.checkpoint.batch_files import Recorder
from consumers.trainer.disk_retry import DiskRetry
from consumers.trainer.leadership import Incarnation
from consumers.trainer.metrics.timing import StepTimer
from consumers.trainer.metrics.trackers import Trackers
from consumers.trainer.rank_group import RankGroup
from consumers.trainer.step.train_step import StepResult
from schemas.config import TidemillConfig
from schemas.errors import InfraError


class RunLog:
    """Appends one line a step to each file, flushed at once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._metrics = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._trained = (folder / "trained.jsonl").open("a", encoding="utf-8")

    def resumed(self, step: int, leader_term: str) -> None:
        """This trainer goes on from weights with ``step`` steps in them."""
        self._line(self._trained, {"resumed": step, "leader_term": leader_term})

    def trained(self, batch: Batch, leader_term: str) -> None:
        """These samples are in the weights now."""
        samples = [
            [group.task_id, member.sample]
            for group in batch.record.groups
            for member in group.members
            if member.trajectory_id
        ]
        line = {"step": batch.record.step, "leader_term": leader_term, "samples": samples, "excluded": batch.excluded}
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


class Books:
    """Of one trainer; ``tokens_per_s`` is that of the last step, without the time in pauses."""

    def __init__(
        self,
        config: TidemillConfig,
        broker: Broker,
        crew: RankGroup,
        progress: Progress,
        incarnation: Incarnation,
        patience: DiskRetry,
        clock: StepTimer,
    ) -> None:
        self._config = config
        self._broker = broker
        self._progress = progress
        self._incarnation = incarnation
        self._patience = patience
        self._clock = clock
        self._log = RunLog(config.folder)
        self._trackers = Trackers(config, crew.ranks.accelerator)
        self._recorder = None
        if config.trainer.record:
            self._recorder = Recorder(config.folder, crew.checkpoints, crew.ranks.world)
        self.tokens_per_s = 0.0

    def resumed(self) -> None:
        """This trainer goes on from the weights as they are."""
        self._log.resumed(self._progress.step, self._incarnation.leader_term)

    def profile(self, step: int) -> Path | None:
        """Where a profile of this step goes, if one is wanted."""
        wanted = step in self._config.trainer.profile_steps
        return self._config.folder / "profiles" / f"step-{step:08d}" if wanted else None

    def record(self, batch: Batch) -> None:
        """Keep what the weights, still counted as before, have just been trained on, if that is wanted."""
        recorder = self._recorder
        if recorder is not None:
            version, leader_term = self._progress.version, self._incarnation.number
            with self._clock.phase("record"):
                self._patience("batches", lambda: recorder.trained(batch, version, leader_term))

    def trained(self, batch: Batch) -> None:
        """The weights have this step now."""
        self._log.trained(batch, self._incarnation.leader_term)

    def covered(self) -> None:
        """A checkpoint was written."""
        if self._recorder is not None:
            self._recorder.covered()

    def figures(self, batch: Batch, result: StepResult) -> dict[str, Any]:
        """End the step's time, and log its figures: a line of metrics.jsonl, which is returned."""
        times = self._clock.lap()
        self.tokens_per_s = result.metrics["tokens"] / (times["total"] - times.get("paused", 0.0))
        line = self._line(batch, result) | {f"time/{name}_s": seconds for name, seconds in times.items()}
        self._log.metrics(line)
        self._trackers.log(line)
        return line

    def show(self, line: dict[str, Any], batch: Batch) -> None:
        """To who looks at the run through the broker."""
        self._broker.metrics.append(line)
        self._broker.samples.keep(self._progress.step, [sample for group in batch.groups for sample in group.samples])

    def close(self) -> None:
        self._trackers.close()
        self._log.close()

    def _line(self, batch: Batch, result: StepResult) -> dict[str, Any]:
        """The step's figures under the field's usual sections."""
        line: dict[str, Any] = {
            "step": self._progress.step,
            "version": self._progress.version,
            "wall_s": time.time() - float(self._progress.started or 0),
            "trajectories": sum(len(group.samples) for group in batch.groups),
            "staleness/histogram": {str(age): tokens for age, tokens in result.staleness.items()},
        }
        for name, value in result.metrics.items():
            section, _, rest = name.partition("_")
            known = section in ("reward", "staleness")
            line[f"{section}/{rest}" if known else f"train/{name}"] = value
        return line
