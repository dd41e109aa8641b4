"""When checkpoints are written, and what the broker may forget after one: a step's data, once it is durable.

Until then a step's record is kept here, and its data in the broker, where it is read again after a crash.
"""

from __future__ import annotations

from broker.training import Training
from consumers.trainer.books import Books
from consumers.trainer.clock import Clock
from consumers.trainer.crew import Crew
from consumers.trainer.incarnation import Incarnation
from consumers.trainer.offers import Offers
from consumers.trainer.patience import Patience, Tell
from consumers.trainer.progress import Progress
from consumers.trainer.source import BatchSource
from schemas.config import TidemillConfig
from schemas.errors import DiskError
from schemas.messages import BatchRecord


class Saving:
    """The checkpoints of one trainer; ``step`` is the one up to which they go."""

    def __init__(
        self,
        config: TidemillConfig,
        crew: Crew,
        training: Training,
        progress: Progress,
        incarnation: Incarnation,
        offers: Offers,
        books: Books,
        patience: Patience,
        clock: Clock,
        tell: Tell,
    ) -> None:
        self._every = config.trainer.checkpoint.every
        self._crew = crew
        self._training = training
        self._progress = progress
        self._incarnation = incarnation
        self._offers = offers
        self._books = books
        self._patience = patience
        self._clock = clock
        self._tell = tell
        self._source: BatchSource | None = None
        self._uncommitted: list[BatchRecord] = []
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
        """Counted from the last one, so that the broker never holds more than trainer.checkpoint.every steps."""
        if self._progress.step - self.step >= self._every:
            with self._clock.phase("checkpoint"):
                self.save()

    def asked(self) -> None:
        """Somebody wants one; nothing is written when the last one is of this step."""
        if self._progress.step != self.step:
            self.save()
        self._tell("checkpoint", "info", f"a checkpoint covers step {self._progress.step}")

    def last(self) -> None:
        """Cover what no checkpoint does."""
        if self._uncommitted:
            self.save()

    def save(self) -> None:
        """Make everything up to here durable, then let the broker forget it. Training waits while the disk is full."""
        self._offers.settle(DiskError)
        progress = self._progress
        look = self._training.look()
        progress.saw(look)
        if look.step > progress.step:
            # Between replays: what is still to be replayed is not in these weights, though its slots have returned.
            progress.will_do([record for step, record in self._training.records().items() if step >= progress.step])
        self._patience("checkpoint", self._write)
        self.step = progress.step
        self._books.covered()
        self._training.commit(self._uncommitted)
        if self._source is not None:
            self._source.committed(self._uncommitted)
        self._uncommitted = []

    def _write(self) -> None:
        progress = self._progress
        self._crew.save(
            step=progress.step, version=progress.version, epoch=self._incarnation.number, extra=progress.extra()
        )
