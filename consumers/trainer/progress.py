"""How far a trainer is: what its checkpoints hold beside tensors, and what a lost broker is rebuilt from.

Every prompt below ``cursor`` has been admitted once; of those, all but ``unfinished`` have ended. So the two
tell which prompts are in the weights or were given up, and which have to be made again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from broker.flow.pipeline import FIRST_LINEAGE, PipelineSnapshot, TakeoverRequest
from broker.flow.run_control import ControlState, Mode
from schemas.config import TidemillConfig
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

    def saw(self, look: PipelineSnapshot) -> None:
        """The pipeline as it is now."""
        self.cursor = look.cursor
        self.unfinished = look.unfinished
        self.counts = look.counts
        self.settings = look.settings
        self.heard(look.orders)

    def heard(self, orders: ControlState) -> None:
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

    def restore(self, step: int, version: int, extra: dict[str, Any]) -> None:
        """As it was when a checkpoint was saved."""
        known = {name: value for name, value in extra.items() if name in self.__dataclass_fields__}
        known |= {"step": step, "version": version, "unfinished": set(extra["unfinished"])}
        for name, value in known.items():
            setattr(self, name, value)

    def known(
        self, config: TidemillConfig, *, saved: int, leader_term_floor: int, version_if_lost: int, fresh: bool
    ) -> TakeoverRequest:
        """For taking the run over."""
        return TakeoverRequest(
            leader_term_floor=leader_term_floor,
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
            every=config.trainer.checkpoint.most_uncovered,
            settings=self.settings,
            pause=self.pause,
            pause_id=self.pause_id,
            pause_by=self.pause_by,
            pause_since=self.pause_since,
            started=self.started,
        )
