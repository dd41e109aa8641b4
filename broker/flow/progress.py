"""The progress of a trainer's weights, and what trainer and broker tell each other of it at a take-over.

Every prompt below ``cursor`` has been admitted once; of those, all but ``unfinished`` have ended. So the two
tell which prompts are in the weights or were given up, and which have to be made again. Checkpoints hold a trainer's
progress beside the tensors, and a broker that lost its memory is rebuilt from it.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from broker.flow.owner import NOBODY, Owner
from broker.flow.pipeline import PipelineSnapshot
from broker.flow.run_control import ControlState
from schemas.control_api import PauseMode
from schemas.messages import BatchRecord

FIRST_LIFETIME = "start"


@dataclass
class Progress:
    """The steps and samples in a trainer's weights, and the pipeline as the trainer saw it last.

    step: optimizer steps that are in the weights. version: names the weights. trained, samples: prompt groups and
    samples that they were trained on. broker_lifetime: names an unbroken life of the broker's data. cursor,
    unfinished: see above. counts: the ledger's, by name. settings: those that people changed in the running system.
    pause, with its number, who asked for it and when (Unix seconds): the last order of that kind. started: when the
    run began. run_id: the run's identity, empty while it is not known. prompts: the curriculum's statistics.
    """

    step: int = 0
    version: int = 0
    broker_lifetime: str = FIRST_LIFETIME
    cursor: int = 0
    unfinished: set[int] = field(default_factory=set)
    trained: int = 0
    samples: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    settings: dict[str, float] = field(default_factory=dict)
    pause: PauseMode = "none"
    pause_id: int = 0
    pause_by: str = ""
    pause_since: int = 0
    started: str | None = None
    run_id: str = ""
    prompts: bytes = b""

    def update(self, pipeline: PipelineSnapshot) -> None:
        """Update the fields that describe the pipeline from its present state."""
        self.cursor = pipeline.cursor
        self.unfinished = pipeline.unfinished
        self.counts = pipeline.counts
        self.settings = pipeline.settings
        self.note_pause(pipeline.control)

    def note_pause(self, control: ControlState) -> None:
        """Keep the last pause or resume that people ordered: a rebuilt broker is told of it again."""
        self.pause, self.pause_id = control.pause, control.pause_id
        self.pause_by, self.pause_since = control.by, int(control.since)

    def mark_unfinished(self, records: Iterable[BatchRecord]) -> None:
        """Count the groups of these steps as unfinished: they are journaled, but not in the weights."""
        self.unfinished.update(group.task_id for record in records for group in record.groups)

    def advance(self, record: BatchRecord) -> None:
        """Count a step as done: the weights hold it from now on."""
        self.step = record.step + 1
        self.version = record.new_version
        self.trained += len(record.groups)
        self.samples += sum(bool(member.trajectory_id) for group in record.groups for member in group.members)
        self.unfinished.difference_update(group.task_id for group in record.groups)

    def to_json(self) -> dict[str, Any]:
        """Everything but step and version, which a checkpoint holds by itself, as JSON."""
        left_out = ("step", "version")
        fields = {name: value for name, value in vars(self).items() if name not in left_out}
        packed = base64.b64encode(zlib.compress(self.prompts, 1)).decode() if self.prompts else ""
        return fields | {"unfinished": sorted(self.unfinished), "prompts": packed}

    def restore(self, step: int, version: int, extra: dict[str, Any]) -> None:
        """Become what a checkpoint holds; ``extra`` is from ``to_json``."""
        known = {name: value for name, value in extra.items() if name in self.__dataclass_fields__}
        known |= {"step": step, "version": version, "unfinished": set(extra["unfinished"])}
        known["prompts"] = zlib.decompress(base64.b64decode(extra["prompts"])) if extra.get("prompts") else b""
        for name, value in known.items():
            setattr(self, name, value)


@dataclass(frozen=True)
class TakeoverRequest:
    """The knowledge of a trainer that takes the run over: from its checkpoint, or from its own life.

    owner: the run itself; without an identity it is not compared with the broker's.
    batch, staleness, window, steps, max_uncommitted (most steps that no checkpoint covers): the configuration's.
    progress: how far its weights are. fresh: whether it is the first trainer, which knows the defaults.
    leader_term_floor: the highest leader term it has heard of. saved: the step up to which the checkpoints go.
    version_if_lost: version of its weights if the broker lost the versions published after ``progress.version``.
    evaluations: complete ones, as lines of evaluations.jsonl.
    """

    batch: int
    staleness: int
    window: int
    steps: int
    max_uncommitted: int
    progress: Progress = field(default_factory=Progress)
    fresh: bool = True
    leader_term_floor: int = 0
    saved: int = 0
    version_if_lost: int = 0
    evaluations: Sequence[Mapping[str, Any]] = ()
    owner: Owner = NOBODY

    def to_json(self) -> dict[str, Any]:
        """The request and its progress in one level, as the broker's script reads them; no field is None.

        The statistics of prompts are not in it: they go beside it, as they are.
        """
        own = {name: value for name, value in vars(self).items() if name not in ("progress", "owner")}
        progress = self.progress
        own |= replace(progress, prompts=b"").to_json() | {"step": progress.step, "version": progress.version}
        own |= {"run_id": self.owner.id, "run_folder": self.owner.folder, "run_host": self.owner.host}
        own["counts"] = progress.counts | {"samples_trained": progress.samples}
        return {name: value for name, value in own.items() if value is not None and name != "prompts"}


@dataclass(frozen=True)
class Takeover:
    """The broker's answer. lost: the broker had lost something, and was mended from what the trainer knew.

    surplus: groups that its counts say ended more often than they were admitted: an error, which the ledger shows
    as a negative ``dropped:counted_twice``. refused_settings: those that people had set, with their values, and that
    leave no room for a batch under this configuration, whose own are in force instead; empty if there are none.
    """

    leader_term: str
    step: int
    version: int
    broker_lifetime: str
    started: str
    lost: bool
    surplus: int = 0
    refused_settings: str = ""
