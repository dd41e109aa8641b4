"""When checkpoints are written, and what the broker may forget after one: a step's data, once it is durable.

Until then a step's record is kept here, and its data in the broker, where it is read again after a crash.
"""

from __future__ import annotations

import structlog

from broker.flow.progress import Progress
from broker.flow.trainer_session import TrainerSession
from consumers.trainer.batch_source import BatchSource
from consumers.trainer.disk_retry import DiskRetry, Tell
from consumers.trainer.leadership import Incarnation
from consumers.trainer.metrics.timing import StepTimer
from consumers.trainer.rank_group import RankGroup
from consumers.trainer.step_log import Books
from schemas.config import TidemillConfig
from schemas.errors import DiskError
from schemas.messages import BatchRecord

log = structlog.get_logger()


class Checkpointing:
    """The checkpoints of one trainer, one at a time; ``step`` is the one up to which they are durable."""

    def __init__(
        self,
        config: TidemillConfig,
        crew: RankGroup,
        training: TrainerSession,
        progress: Progress,
        incarnation: Incarnation,
        books: Books,
        patience: DiskRetry,
        clock: StepTimer,
        tell: Tell,
    ) -> None:
        self._every = config.trainer.checkpoint.every
        self._crew = crew
        self._training = training
        self._progress = progress
        self._incarnation = incarnation
        self._books = books
        self._patience = patience
        self._clock = clock
        self._tell = tell
        self._source: BatchSource | None = None
        self._uncommitted: list[BatchRecord] = []
        self._begun: int | None = None
        """Up to which step the one goes that is being written."""
        self.step = 0

    def begin(self, source: BatchSource) -> None:
        """After a take-over: ``source`` has the data of the steps to come."""
        self._source = source
        self._uncommitted = []

    def resume(self) -> list[BatchRecord]:
        """Let the broker forget what a checkpoint covers; returns the journaled steps that the weights do not have."""
        records = [record for _, record in sorted(self._training.records().items())]
        self._training.commit([record for record in records if record.step < self.step])
        self._uncommitted = [record for record in records if self.step <= record.step < self._progress.step]
        if self._source is not None:
            self._source.hold(self._uncommitted)
        return [record for record in records if record.step >= self._progress.step]

    def trained(self, record: BatchRecord) -> None:
        """The weights have this step now."""
        self._uncommitted.append(record)

    def if_due(self) -> None:
        """Begin one after every trainer.checkpoint.every steps, counted from the last.

        It is written while training goes on, and the next one waits for it: the broker holds at most twice as many.
        """
        with self._clock.phase("checkpoint"):
            self.look()
            last = self.step if self._begun is None else self._begun
            if self._progress.step - last >= self._every:
                self._settle()
                self._begin()
                self.look()

    def look(self) -> None:
        """Without waiting: let the broker forget what is durable now."""
        if self._begun is not None and not self._crew.saving:
            self._settle()

    def asked(self) -> None:
        """Somebody wants one; nothing is written when the last one is of this step."""
        self._settle()
        if self._progress.step != self.step:
            self.save()
        self._tell("checkpoint", "info", f"a checkpoint covers step {self._progress.step}")

    def last(self) -> None:
        """Cover what no checkpoint does."""
        self._settle()
        if self._uncommitted:
            self.save()

    def save(self) -> None:
        """Make everything up to here durable, and then let the broker forget it."""
        self._settle()
        self._patience("checkpoint", self._complete)

    def leave(self) -> None:
        """The broker is lost: wait for what is under way, and let it forget nothing."""
        try:
            self._wait()
        except DiskError as error:
            log.warning("a checkpoint was not written", error=str(error))

    def _settle(self) -> None:
        """Wait for the one that is under way. If it found no room, training waits until another one of now did."""
        if self._begun is None:
            return
        try:
            self._complete()
        except DiskError as error:
            self._patience.refused("checkpoint", error)
            self._patience("checkpoint", self._complete)

    def _complete(self) -> None:
        """One is durable: the one under way, or else one of now."""
        if self._begun is None:
            self._begin()
        self._wait()
        self._books.covered()
        covered = [record for record in self._uncommitted if record.step < self.step]
        self._training.commit(covered)
        if self._source is not None:
            self._source.committed(covered)
        self._uncommitted = [record for record in self._uncommitted if record.step >= self.step]

    def _wait(self) -> None:
        """For the one under way; DiskError when it found no room, and then none is."""
        begun, self._begun = self._begun, None
        self._crew.saved()
        if begun is not None:
            self.step = begun

    def _begin(self) -> None:
        progress = self._progress
        look = self._training.look()
        progress.update(look)
        if look.step > progress.step:
            # Between replays: what is still to be replayed is not in these weights, though its slots have returned.
            progress.mark_unfinished(
                [record for step, record in self._training.records().items() if step >= progress.step]
            )
        self._crew.save(
            step=progress.step, version=progress.version, leader_term=self._incarnation.number, extra=progress.to_json()
        )
        self._begun = progress.step
