"""The progress of a trainer, and what trainer and broker exchange about it at a takeover.

Every prompt below ``cursor`` was admitted once, and all of these have ended except ``unfinished``. The two fields tell
which prompts are in the weights or were given up, and which have to be made again. Checkpoints hold the progress beside
the tensors, and a broker that lost its data is rebuilt from it.
"""

import base64
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from broker.flow.owner import NO_OWNER, Owner
from broker.flow.pipeline import PipelineSnapshot
from broker.flow.run_control import ControlState
from schemas.control_api.base import PauseMode
from schemas.messages import BatchRecord

FIRST_LIFETIME = "start"


@dataclass
class Progress:
    """The steps and samples in a trainer's weights, and the pipeline as the trainer saw it last.

    step: optimizer steps that are in the weights. version: of the weights. trained, samples: prompt groups and samples
    that they were trained on. broker_lifetime: identity of the broker's data. cursor, unfinished: see above. counts:
    the ledger's, by name. settings: those that users changed in the running run. pause, pause_id, pause_by,
    pause_since (Unix seconds): the last pause or resume. started: when the run began. run_id: the run's identity, empty
    if unknown. prompts: the curriculum's statistics.
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
        """Update the fields that describe the pipeline."""
        self.cursor = pipeline.cursor
        self.unfinished = pipeline.unfinished
        self.counts = pipeline.counts
        self.settings = pipeline.settings
        self.note_pause(pipeline.control)

    def note_pause(self, control: ControlState) -> None:
        """Record the last pause or resume, with which a broker is rebuilt."""
        self.pause, self.pause_id = control.pause, control.pause_id
        self.pause_by, self.pause_since = control.by, int(control.since)

    def mark_unfinished(self, records: Iterable[BatchRecord]) -> None:
        """Mark the groups of these steps as unfinished: they are in the journal, but not in the weights."""
        self.unfinished.update(group.task_id for record in records for group in record.groups)

    def advance(self, record: BatchRecord) -> None:
        """Record a step as done: the weights contain it now."""
        self.step = record.step + 1
        self.version = record.new_version
        self.trained += len(record.groups)
        self.samples += sum(bool(member.trajectory_id) for group in record.groups for member in group.members)
        self.unfinished.difference_update(group.task_id for group in record.groups)

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON, except step and version, which a checkpoint holds itself."""
        left_out = ("step", "version")
        fields = {name: value for name, value in vars(self).items() if name not in left_out}
        packed = base64.b64encode(zlib.compress(self.prompts, 1)).decode() if self.prompts else ""
        return fields | {"unfinished": sorted(self.unfinished), "prompts": packed}

    def restore(self, step: int, version: int, extra: dict[str, Any]) -> None:
        """Restore the fields from a checkpoint; ``extra`` is from ``to_json``."""
        known = {name: value for name, value in extra.items() if name in self.__dataclass_fields__}
        known |= {"step": step, "version": version, "unfinished": set(extra["unfinished"])}
        known["prompts"] = zlib.decompress(base64.b64decode(extra["prompts"])) if extra.get("prompts") else b""
        for name, value in known.items():
            setattr(self, name, value)


@dataclass(frozen=True)
class TakeoverRequest:
    """Knowledge of a trainer that takes the run over, from its checkpoint or from its own steps.

    owner: the run; without an id it is not compared with the broker's.
    batch, staleness, window, steps, max_uncommitted (most steps that no checkpoint covers): as configured.
    progress: that of its weights. fresh: whether it is the first trainer, which knows only defaults.
    leader_term_floor: the highest leader term that it knows. saved: the last step that a checkpoint covers.
    version_if_lost: version of its weights if the broker lost the versions published after ``progress.version``.
    evaluations: the complete ones, as lines of evaluations.jsonl.
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
    owner: Owner = NO_OWNER

    def to_json(self) -> dict[str, Any]:
        """Return the request and its progress as one flat object, for the broker's script; no field is None.

        The statistics of prompts are sent beside it, as bytes.
        """
        own = {name: value for name, value in vars(self).items() if name not in ("progress", "owner")}
        progress = self.progress
        own |= replace(progress, prompts=b"").to_json() | {"step": progress.step, "version": progress.version}
        own |= {"run_id": self.owner.id, "run_folder": self.owner.folder, "run_host": self.owner.host}
        own["counts"] = progress.counts | {"samples_trained": progress.samples}
        return {name: value for name, value in own.items() if value is not None and name != "prompts"}


@dataclass(frozen=True)
class Takeover:
    """The broker's reply. lost: the broker had lost data and was repaired from what the trainer knows.

    surplus: how many more groups ended than were admitted, by the broker's counts: an error, which the ledger shows as
    a negative ``dropped:counted_twice``. refused_settings: settings that users had changed, with their values, but that
    leave too few slots for a batch under this configuration, whose values are used instead; "" if there are none.
    """

    leader_term: str
    step: int
    version: int
    broker_lifetime: str
    started: str
    lost: bool
    surplus: int = 0
    refused_settings: str = ""
