"""The trainer's loop, on one page: claim, journal, step, publish, free the slots; now and then a checkpoint.

Exactly once: a step's data is in the journal before it is trained, and is acknowledged only when a
durable checkpoint covers it. A restarted trainer replays the journal on the same data. A broker that lost its
memory is mended from what the trainer knows, in the same process.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Literal

import structlog
import torch

from broker.client import Broker
from broker.fence import incarnation
from broker.presence import Presence
from consumers.trainer.clock import Clock
from consumers.trainer.crew import Crew
from consumers.trainer.export import copy_tokenizer
from consumers.trainer.heed import Heed
from consumers.trainer.patience import with_patience
from consumers.trainer.policy import Policy, load_model
from consumers.trainer.progress import Incarnation, Progress
from consumers.trainer.publisher import Publisher
from consumers.trainer.ranks import Ranks
from consumers.trainer.record import Recorder
from consumers.trainer.runlog import RunLog
from consumers.trainer.source import Batch, BatchSource
from consumers.trainer.step import StepResult, TrainStep
from consumers.trainer.trackers import Trackers, check_trackers
from schemas.config import TidemillConfig
from schemas.errors import BrokerDamaged, BrokerLost, DiskError, InfraError
from schemas.lifecycle import StopFlag
from schemas.messages import BatchRecord, Event

EVAL_DEADLINE_S = 300.0

log = structlog.get_logger()


def run_trainer(config: TidemillConfig, name: str) -> None:
    """Train until trainer.steps are done or the process is asked to end; both leave a checkpoint.

    Started as several ranks (torchrun), rank 0 is the trainer for everyone else, and the others follow it.
    """
    check_trackers(config.trainer.trackers)
    stop = StopFlag().install()
    if config.trainer.threads:
        torch.set_num_threads(config.trainer.threads)
    torch.manual_seed(config.run.seed)
    ranks = Ranks(config.trainer.rank_deadline_s)
    if ranks.world > 1:
        structlog.contextvars.bind_contextvars(rank=ranks.rank)
    with ranks.lifeline():
        policy = Policy(load_model(config.model.path, "float32", config.model.trust_remote_code))
        step = TrainStep.from_config(policy, config, ranks)
        if not ranks.is_main:
            # Asked to end, it goes on until rank 0 has saved, which needs all ranks.
            Crew(config, step).follow()
            return
        broker = Broker.connect(config)
        trainer = Trainer(config, name, broker, step)
        presence = Presence(
            broker, name, "trainer", trainer.describe, obeyed=lambda: trainer.heed.obeyed, probes=config.probes
        )
        trainer.heed.changed = presence.soon
        with presence:
            trainer.run(stop)


class Trainer:
    """State of one trainer process; ``progress`` is how far its weights are."""

    def __init__(self, config: TidemillConfig, name: str, broker: Broker, step: TrainStep) -> None:
        self._config = config
        self._name = name
        self._broker = broker
        self._crew = Crew(config, step)
        self._training = broker.training()
        self._incarnation = Incarnation(self._crew.checkpoints.folder)
        self._log = RunLog(config.folder)
        self._trackers = Trackers(config, self._crew.ranks.accelerator)
        self._recorder = None
        if config.trainer.record:
            self._recorder = Recorder(config.folder, self._crew.checkpoints, self._crew.ranks.world)
        self._publisher = Publisher(config, broker, step.policy.causal_lm.config.get_text_config().vocab_size)
        self.heed = Heed(self._crew.checkpoints.folder, broker, self._checkpoint_now)
        self._uncommitted: list[BatchRecord] = []
        self._saved_step = 0
        self._stop = StopFlag()
        self._floor = 0
        self._epoch = "0-none"
        self._state = "starting"
        self._tokens_per_s = 0.0
        self._clock = Clock()
        self.progress = Progress()

    def describe(self) -> tuple[str, int, dict[str, float]]:
        progress = self.progress
        state = "paused" if self.heed.paused else self._state
        rate = 0.0 if self.heed.paused else self._tokens_per_s
        return state, progress.version, {"step": float(progress.step), "tokens_per_s": rate}

    def run(self, stop: StopFlag) -> None:
        """Recover, replay, train, finish; once more after the broker lost what it knew."""
        self._stop = stop
        fresh = self._recover()
        while True:
            try:
                self._work(self._take_over(fresh, stop), stop)
                return
            except BrokerLost as error:
                log.warning("the broker is compared with what is in the weights", reason=str(error))
                self._incarnation.check(self._epoch)
                # What is still under way has the old epoch; after the take-over that would be another trainer's.
                self._publisher.settle(InfraError)
                fresh = False
                if isinstance(error, BrokerDamaged):
                    # Its lineage ends here: everything that is not in the weights is made again.
                    self.progress.lineage = ""

    def _work(self, replays: list[BatchRecord], stop: StopFlag) -> None:
        self._state = "replaying"
        for record in replays:
            if self.heed.hold(stop, self.progress) and stop:
                break
            log.info("replaying a journaled step", step=record.step)
            self._train(self._source.replay(record), stop)
            self._checkpoint_if_due(stop)
        self._state = "running"
        while self.progress.step < self._config.trainer.steps and not stop:
            held = self.heed.held_s
            with self._clock.phase("wait"):
                # A number that may have been published names those weights, also when they are lost.
                batch = self._source.next(max(self.progress.version, self._floor) + 1, stop)
            self._clock.split("wait", {"paused": self.heed.held_s - held})
            if batch is None:
                break
            self._train(batch, stop)
            self._checkpoint_if_due(stop)
        self._finish(stop)

    def _recover(self) -> bool:
        """Load the newest checkpoint; whether this is the first trainer of the run."""
        newest = self._crew.checkpoints.newest()
        for refused in newest.refused:
            log.warning("a damaged checkpoint is not used", problem=refused)
        seen = self._incarnation.read()
        if newest.path is not None:
            restored = self._crew.load(newest.path)
            self.progress = Progress.restored(restored.step, restored.version, restored.extra)
            self._saved_step = restored.step
            log.info("resumed from a checkpoint", step=restored.step)
        self.heed.restore(self.progress)
        self._floor = self.progress.version
        if seen is not None:
            self._floor = max(self._floor, seen.version)
        elif newest.path is not None:
            self._floor += self._config.trainer.checkpoint.every
        return seen is None and newest.path is None

    def _take_over(self, fresh: bool, stop: StopFlag) -> list[BatchRecord]:
        """Become the one trainer, mend the broker if it lost something; returns the steps to replay."""
        progress, seen = self.progress, self._incarnation.read()
        takeover = self._training.begin(
            progress.known(
                self._config,
                saved=self._saved_step,
                epoch_floor=seen.number if seen else 0,
                version_if_lost=progress.version if self._floor <= progress.version else self._floor + 1,
                fresh=fresh,
            )
        )
        self._epoch = takeover.epoch
        floor = max(self._floor, progress.version)
        self._patiently("epoch", lambda: self._incarnation.write(takeover.epoch, floor, durable=True), stop)
        self._crew.checkpoints.sweep(incarnation(takeover.epoch))
        self._log.resumed(progress.step, takeover.epoch)
        quiet = functools.partial(self._publish, stop)
        self._source = BatchSource(self._config, self._training, progress, quiet, self.heed)
        self._publisher.epoch = takeover.epoch
        progress.lineage, progress.started = takeover.lineage, takeover.started
        self._uncommitted = []
        if takeover.lost:
            progress.version = max(progress.version, takeover.version)
            if takeover.surplus:
                text = f"the mended ledger counts {takeover.surplus} prompt groups twice: compare the run's log with it"
                self._emit("ledger", "error", text)
            self._emit("broker_mended", "warning", f"the broker was mended; training goes on at step {progress.step}")
            self._checkpoint(stop)
        self._publish(stop)
        records = [record for _, record in sorted(self._training.records().items())]
        self._training.commit([record for record in records if record.step < self._saved_step])
        self._uncommitted = [record for record in records if self._saved_step <= record.step < progress.step]
        self._source.hold(self._uncommitted)
        return [record for record in records if record.step >= progress.step]

    def _train(self, batch: Batch, stop: StopFlag) -> None:
        progress, step = self.progress, batch.record.step
        profile = step in self._config.trainer.profile_steps
        with self._clock.phase("assemble"):
            trace = self._config.folder / "profiles" / f"step-{step:08d}" if profile else None
            result = self._crew.train(batch.groups, progress.version, trace)
        # What is left of it: planning, sending, collating.
        parts = {name: seconds for name, seconds in result.seconds.items() if name not in ("other", "total")}
        self._clock.split("assemble", parts)
        if result.skipped:
            log.warning("step skipped: its loss or gradient is not finite", step=progress.step)
        self._record(batch, stop)
        progress.did(batch.record)
        self._log.trained(batch, self._epoch)
        self._uncommitted.append(batch.record)
        with self._clock.phase("publish"):
            self._publish(stop)
        times = self._clock.lap()
        self._tokens_per_s = result.metrics["tokens"] / (times["total"] - times.get("paused", 0.0))
        line = self._line(batch, result) | {f"time/{name}_s": seconds for name, seconds in times.items()}
        self._log.metrics(line)
        self._trackers.log(line)
        self._training.step(batch.record)
        self._broker.metrics.append(line)
        self._broker.samples.keep(self.progress.step, [sample for group in batch.groups for sample in group.samples])

    def _record(self, batch: Batch, stop: StopFlag) -> None:
        """Keep what these weights have just been trained on, if that is wanted."""
        recorder = self._recorder
        if recorder is not None:
            version, epoch = self.progress.version, incarnation(self._epoch)
            with self._clock.phase("record"):
                self._patiently("batches", lambda: recorder.trained(batch, version, epoch), stop)

    def _publish(self, stop: StopFlag) -> None:
        """Offer these weights to the generators. Training waits while the disk is full, as for a checkpoint."""
        self._patiently("weights", self._offer, stop)

    def _send(self) -> None:
        """Like ``_offer``, until they are there."""
        self._offer()
        self._publisher.flush()

    def _offer(self) -> None:
        """Unless the generators can get these weights or newer ones already."""
        self._publisher.flush()
        store, version = self._broker.weights, self.progress.version
        newest = store.newest()
        if newest is None or newest.version < version or (newest.version == version and not store.holds(newest)):
            self._floor = max(self._floor, self.progress.version)
            self._incarnation.write(self._epoch, self._floor)
            self._publisher.publish(self._crew, self.progress.version, self.progress.step)

    def _line(self, batch: Batch, result: StepResult) -> dict[str, Any]:
        """One line of metrics.jsonl: the step's figures under the field's usual sections."""
        line: dict[str, Any] = {
            "step": self.progress.step,
            "version": self.progress.version,
            "wall_s": time.time() - float(self.progress.started or 0),
            "trajectories": sum(len(group.samples) for group in batch.groups),
            "staleness/histogram": {str(age): tokens for age, tokens in result.staleness.items()},
        }
        for name, value in result.metrics.items():
            section, _, rest = name.partition("_")
            known = section in ("reward", "staleness")
            line[f"{section}/{rest}" if known else f"train/{name}"] = value
        return line

    def _checkpoint_if_due(self, stop: StopFlag) -> None:
        """Counted from the last one, so that the broker never holds more than trainer.checkpoint.every steps."""
        if self.progress.step - self._saved_step >= self._config.trainer.checkpoint.every:
            with self._clock.phase("checkpoint"):
                self._checkpoint(stop)

    def _checkpoint_now(self) -> None:
        """Somebody asked for one; nothing is written when the last one is of this step."""
        if self.progress.step != self._saved_step:
            self._checkpoint(self._stop)
        self._emit("checkpoint", "info", f"a checkpoint covers step {self.progress.step}")

    def _checkpoint(self, stop: StopFlag) -> None:
        """Make everything up to here durable, then let the broker forget it.

        Training waits while the folder can't be written: going on would leave the broker with ever more data.
        """
        self._publisher.settle(DiskError)
        progress = self.progress
        look = self._training.look()
        progress.saw(look)
        if look.step > progress.step:
            # Between replays: what is still to be replayed is not in these weights, though its slots have returned.
            progress.will_do([record for step, record in self._training.records().items() if step >= progress.step])

        def save() -> None:
            self._crew.save(
                step=progress.step,
                version=progress.version,
                epoch=incarnation(self._epoch),
                extra=progress.extra(),
            )

        self._patiently("checkpoint", save, stop)
        self._saved_step = progress.step
        if self._recorder is not None:
            self._recorder.covered()
        self._training.commit(self._uncommitted)
        self._source.committed(self._uncommitted)
        self._uncommitted = []

    def _patiently(self, what: str, act: Callable[[], None], stop: StopFlag) -> None:
        def refused(error: DiskError) -> None:
            log.warning("waiting for room", writing=what, error=str(error))
            self._emit(what, "error", str(error))

        with_patience(act, self._config.trainer.checkpoint.deadline_s, stop, refused)

    def _emit(self, name: str, level: Literal["info", "warning", "error"], text: str) -> None:
        self._broker.events.emit(Event(name=name, service=self._name, level=level, text=text))

    def _finish(self, stop: StopFlag) -> None:
        if self._uncommitted:
            self._checkpoint(stop)
        self._publisher.settle(DiskError)
        if self.progress.step >= self._config.trainer.steps:
            self._state = "finishing"
            self._patiently("weights", self._send, stop)
            self._wait_for_last_evaluation(stop)
            if not stop:
                self._save_model()
                self._training.finish()
        self._publisher.close()
        self._crew.dismiss()
        self._trackers.close()
        self._log.close()

    def _wait_for_last_evaluation(self, stop: StopFlag) -> None:
        if self._config.eval is None:
            return
        deadline = time.monotonic() + EVAL_DEADLINE_S
        while not stop and time.monotonic() < deadline:
            if self.heed.hold(stop, self.progress):
                deadline = time.monotonic() + EVAL_DEADLINE_S
            position = self._broker.ledger.change_position()
            if any(
                result.version == self.progress.version and result.complete for result in self._broker.evals.results()
            ):
                return
            self._broker.ledger.wait_change(position, 200)
        if stop:
            return
        text = f"the evaluation of version {self.progress.version} was not complete after {EVAL_DEADLINE_S:.0f} s"
        log.warning(text)
        self._emit("evaluation", "warning", text)

    def _save_model(self) -> None:
        """The trained model, ready for transformers and vLLM."""
        folder = self._config.folder / "model"
        self._crew.export(folder)
        copy_tokenizer(self._config.model, folder)
