"""The trainer's loop, on one page: claim, journal, step, publish, free the slots; now and then a checkpoint.

Exactly once: a step's data is in the journal before it is trained, and is acknowledged only when a
durable checkpoint covers it. A restarted trainer replays the journal on the same data. A broker that lost its
memory is mended from what the trainer knows, in the same process.
"""

from __future__ import annotations

from typing import Literal

import structlog

from broker.client import Broker
from broker.flow.progress import Progress
from consumers.trainer.batch_source import Batch, BatchSource
from consumers.trainer.checkpointing import Checkpointing
from consumers.trainer.disk_retry import DiskRetry
from consumers.trainer.finish import wait_for_evaluation, write_model
from consumers.trainer.leadership import Incarnation, Succession
from consumers.trainer.metrics.timing import StepTimer
from consumers.trainer.pause import PauseFollower
from consumers.trainer.publishing import Offers
from consumers.trainer.rank_group import RankGroup
from consumers.trainer.step.train_step import TrainStep
from consumers.trainer.step_log import Books
from schemas.config import TidemillConfig
from schemas.errors import BrokerLost, DiskError, InfraError
from schemas.lifecycle import StopFlag
from schemas.messages import BatchRecord, Event

log = structlog.get_logger()


class Trainer:
    """One trainer process; ``progress`` is how far its weights are, and ``heed`` follows what people ask."""

    def __init__(self, config: TidemillConfig, name: str, broker: Broker, step: TrainStep) -> None:
        self._config, self._name, self._broker = config, name, broker
        self._state = "starting"
        self._clock = StepTimer()
        self._training = broker.training()
        self.progress = progress = Progress()
        self._crew = crew = RankGroup(config, step)
        self._incarnation = incarnation = Incarnation(crew.checkpoints.folder)
        self._patience = patience = DiskRetry(config.trainer.checkpoint.deadline_s, self._tell)
        self._books = books = Books(config, broker, crew, progress, incarnation, patience, self._clock)
        self._offers = Offers(config, broker, crew, progress, incarnation, patience)
        self._saving = Checkpointing(
            config,
            crew,
            self._training,
            progress,
            incarnation,
            books,
            patience,
            self._clock,
            self._tell,
        )
        self._succession = Succession(config, crew, self._training, progress, incarnation, patience, self._tell)
        self.heed = PauseFollower(crew.checkpoints.folder, broker, self._saving.asked)

    def describe(self) -> tuple[str, int, dict[str, float]]:
        """State, version and figures for the heartbeat."""
        state = "paused" if self.heed.paused else self._state
        rate = 0.0 if self.heed.paused else self._books.tokens_per_s
        return state, self.progress.version, {"step": float(self.progress.step), "tokens_per_s": rate}

    def run(self, stop: StopFlag) -> None:
        """Recover, replay, train, finish; once more after the broker lost what it knew."""
        self._patience.stop = stop
        self._saving.step = self._succession.recover()
        self.heed.restore(self.progress)
        while True:
            try:
                replays = self._take_over()
                self._replay(replays, stop)
                self._work(stop)
                self._finish(stop)
                return
            except BrokerLost as error:
                self._succession.lost(error)
                # What is still under way has the old term; after the take-over that would be another trainer's.
                self._offers.settle(InfraError)
                self._saving.leave()

    def _take_over(self) -> list[BatchRecord]:
        """Become the one trainer; returns the steps to replay."""
        mended = self._succession.take_over(self._saving.step)
        self._books.resumed()
        self._source = BatchSource(self._config, self._training, self.progress, self._idle, self.heed)
        self._saving.begin(self._source)
        if mended:
            self._saving.save()
        self._offers.offer()
        return self._saving.resume()

    def _idle(self) -> None:
        """While no batch comes: what the others may wait for, room in the broker or weights."""
        self._saving.look()
        self._offers.offer()

    def _replay(self, records: list[BatchRecord], stop: StopFlag) -> None:
        """Train journaled steps that the weights do not have, on the same data as before."""
        self._state = "replaying"
        for record in records:
            if self.heed.hold(stop, self.progress) and stop:
                break
            log.info("replaying a journaled step", step=record.step)
            self._train(self._source.replay(record))
            self._saving.if_due()

    def _work(self, stop: StopFlag) -> None:
        """Train as batches come, until trainer.steps are done or the trainer is asked to stop."""
        self._state = "running"
        while self.progress.step < self._config.trainer.steps and not stop:
            held = self.heed.held_s
            with self._clock.phase("wait"):
                # A number that may have been published names those weights, also when they are lost.
                batch = self._source.next(max(self.progress.version, self._incarnation.floor) + 1, stop)
            self._clock.split("wait", {"paused": self.heed.held_s - held})
            if batch is None:
                break
            self._train(batch)
            self._saving.if_due()

    def _train(self, batch: Batch) -> None:
        """One step: its batch is in the journal already, and its slots return at the end."""
        with self._clock.phase("assemble"):
            trace = self._books.profile(batch.record.step)
            result = self._crew.train(batch.groups, self.progress.version, trace)
        # What is left of it: planning, sending, collating.
        parts = {name: seconds for name, seconds in result.seconds.items() if name not in ("other", "total")}
        self._clock.split("assemble", parts)
        if result.skipped:
            log.warning("step skipped: its loss or gradient is not finite", step=self.progress.step)
        self._books.record(batch)
        self.progress.advance(batch.record)
        self._books.trained(batch)
        self._saving.trained(batch.record)
        with self._clock.phase("publish"):
            self._offers.offer()
        line = self._books.figures(batch, result)
        self._training.step(batch.record)
        self._books.show(line, batch)

    def _finish(self, stop: StopFlag) -> None:
        """Leave a checkpoint; and the model, when all steps are done."""
        self._saving.last()
        self._offers.settle(DiskError)
        if self.progress.step >= self._config.trainer.steps:
            self._state = "finishing"
            self._offers.send()
            if self._config.eval is not None:
                wait_for_evaluation(self._broker, self.heed, self.progress, stop, self._tell)
            if not stop:
                write_model(self._config, self._crew)
                self._training.finish()
        self._offers.close()
        self._crew.dismiss()
        self._books.close()

    def _tell(self, name: str, level: Literal["info", "warning", "error"], text: str) -> None:
        self._broker.events.emit(Event(name=name, service=self._name, level=level, text=text))
