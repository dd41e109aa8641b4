"""The trainer's loop, on one page: claim, journal, step, publish, free the slots; now and then a checkpoint.

Exactly once: a step's data is in the journal before it is trained, and is acknowledged only when a
durable checkpoint covers it. A restarted trainer replays the journal on the same data.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import structlog
import torch

from broker.client import Broker
from broker.presence import Presence
from broker.training import Takeover
from consumers.trainer.checkpoints import Checkpoints
from consumers.trainer.export import copy_tokenizer
from consumers.trainer.policy import Policy, load_model
from consumers.trainer.publisher import Publisher
from consumers.trainer.runlog import RunLog
from consumers.trainer.source import Batch, BatchSource
from consumers.trainer.step import StepResult, TrainStep
from schemas.config import TidemillConfig
from schemas.errors import InfraError
from schemas.lifecycle import StopFlag
from schemas.messages import BatchRecord, Event

EVAL_DEADLINE_S = 300.0

log = structlog.get_logger()


def run_trainer(config: TidemillConfig, name: str) -> None:
    """Train until trainer.steps are done or the process is asked to end; both leave a checkpoint."""
    stop = StopFlag().install()
    if config.trainer.threads:
        torch.set_num_threads(config.trainer.threads)
    torch.manual_seed(config.run.seed)
    broker = Broker.connect(config)
    policy = Policy(load_model(config.model.path, config.model.dtype, config.model.trust_remote_code))
    trainer = Trainer(config, name, broker, TrainStep.from_config(policy, config))
    with Presence(broker, name, "trainer", trainer.describe):
        trainer.run(stop)


class Trainer:
    """State of one trainer process. ``step`` counts finished optimizer steps, ``version`` names the weights."""

    def __init__(self, config: TidemillConfig, name: str, broker: Broker, step: TrainStep) -> None:
        self._config = config
        self._name = name
        self._broker = broker
        self._step = step
        self._training = broker.training()
        self._source = BatchSource(config, self._training)
        self._checkpoints = Checkpoints(config.folder / "checkpoints", config.trainer.checkpoint.keep)
        self._log = RunLog(config.folder)
        self._uncommitted: list[BatchRecord] = []
        self._state = "starting"
        self._started = time.time()
        self._tokens_per_s = 0.0
        self.step = 0
        self.version = 0

    def describe(self) -> tuple[str, int, dict[str, float]]:
        return self._state, self.version, {"step": float(self.step), "tokens_per_s": self._tokens_per_s}

    def run(self, stop: StopFlag) -> None:
        """Recover, replay, train, finish."""
        takeover = self._recover()
        epoch_number = int(takeover.epoch.partition("-")[0])
        vocabulary = self._step.policy.causal_lm.config.get_text_config().vocab_size
        self._publisher = Publisher(self._config, self._broker, epoch_number, vocabulary)
        self._publisher.publish(self._step.policy, self.version, self.step)
        for batch in self._replays():
            self._train(batch, takeover.epoch)
        self._state = "running"
        while self.step < self._config.trainer.steps and not stop:
            started = time.monotonic()
            batch = self._source.next(self.step, self.version, stop)
            if batch is None:
                break
            self._train(batch, takeover.epoch, waited_s=time.monotonic() - started)
            if self.step % self._config.trainer.checkpoint.every == 0:
                self._checkpoint()
        self._finish(stop)

    def _recover(self) -> Takeover:
        """Load the newest checkpoint and take the run over; what the checkpoint covers is acknowledged."""
        newest = self._checkpoints.newest()
        for refused in newest.refused:
            log.warning("a damaged checkpoint is not used", problem=refused)
        extra: dict[str, Any] = {}
        if newest.path is not None:
            restored = self._checkpoints.load(newest.path, self._step)
            self.step, self.version, extra = restored.step, restored.version, restored.extra
            log.info("resumed from a checkpoint", step=self.step)
        config = self._config
        takeover = self._training.begin(
            epoch_floor=extra.get("epoch", 0),
            step=self.step,
            version=self.version,
            cursor=extra.get("cursor", 0),
            slots=config.slots,
            total=config.trainer.steps * config.trainer.batch_groups,
            trained=self.step * config.trainer.batch_groups,
        )
        self._started = self._broker.ledger.state().started
        records = self._training.records()
        covered = [record for step, record in sorted(records.items()) if step < self.step]
        self._training.commit(covered)
        self._journaled = [record for step, record in sorted(records.items()) if step >= self.step]
        if takeover.step > self.step + len(self._journaled):
            raise InfraError(
                f"the broker is at step {takeover.step}, the newest checkpoint at {self.step} and the journal holds"
                f" {len(self._journaled)} steps after it: the checkpoints in {config.folder} are not this run's;"
                " give the run another run.name or restore its folder"
            )
        return takeover

    def _replays(self) -> Iterable[Batch]:
        self._state = "replaying"
        for record in self._journaled:
            log.info("replaying a journaled step", step=record.step)
            yield self._source.replay(record)

    def _train(self, batch: Batch, epoch: str, waited_s: float = 0.0) -> None:
        started = time.monotonic()
        result = self._step.run(self._step.assemble(batch.groups), version=self.version)
        trained = time.monotonic()
        if result.skipped:
            log.warning("step skipped: its loss or gradient is not finite", step=self.step)
        self.step, self.version = self.step + 1, self.version + 1
        self._publisher.publish(self._step.policy, self.version, self.step)
        self._training.step(batch.record, self.version)
        self._uncommitted.append(batch.record)
        published = time.monotonic()
        seconds = waited_s + published - started
        self._tokens_per_s = result.metrics["tokens"] / seconds
        times = {"time/wait_s": waited_s, "time/publish_s": published - trained, "time/total_s": seconds}
        line = self._line(batch, result) | times
        self._log.step(batch, epoch, line)
        self._broker.metrics.append(line)

    def _line(self, batch: Batch, result: StepResult) -> dict[str, Any]:
        """One line of metrics.jsonl: the step's figures under the field's usual sections."""
        line: dict[str, Any] = {
            "step": self.step,
            "version": self.version,
            "wall_s": time.time() - self._started,
            "trajectories": sum(len(group.samples) for group in batch.groups),
            "staleness/histogram": {str(age): tokens for age, tokens in result.staleness.items()},
        }
        for name, value in result.metrics.items():
            section, _, rest = name.partition("_")
            known = section in ("reward", "staleness", "time")
            line[f"{section}/{rest}" if known else f"train/{name}"] = value
        return line

    def _checkpoint(self) -> None:
        """Make everything up to here durable, then let the broker forget it."""
        self._publisher.flush()
        ledger = self._broker.ledger.state()
        number = ledger.epoch
        extra = {
            "epoch": number,
            "cursor": ledger.cursor,
            "unfinished": [slot.task_id for slot in self._training.active()],
        }
        self._checkpoints.save(self._step, step=self.step, version=self.version, extra=extra)
        self._training.commit(self._uncommitted)
        self._source.committed(self._uncommitted)
        self._uncommitted.clear()

    def _finish(self, stop: StopFlag) -> None:
        if self._uncommitted:
            self._checkpoint()
        self._publisher.close()
        if self.step >= self._config.trainer.steps:
            self._state = "finishing"
            self._wait_for_last_evaluation(stop)
            if not stop:
                self._save_model()
                self._broker.ledger.set("state", "finished")
        self._log.close()

    def _wait_for_last_evaluation(self, stop: StopFlag) -> None:
        if self._config.eval is None:
            return
        deadline = time.monotonic() + EVAL_DEADLINE_S
        while not stop and time.monotonic() < deadline:
            position = self._broker.ledger.change_position()
            if any(result.version == self.version and result.complete for result in self._broker.evals.results()):
                return
            self._broker.ledger.wait_change(position, 200)
        if stop:
            return
        text = f"the evaluation of version {self.version} was not complete after {EVAL_DEADLINE_S:.0f} s"
        log.warning(text)
        self._broker.events.emit(Event(name="evaluation", service=self._name, level="warning", text=text))

    def _save_model(self) -> None:
        """The trained model, ready for transformers and vLLM."""
        folder = self._config.folder / "model"
        self._step.policy.causal_lm.save_pretrained(folder)
        copy_tokenizer(self._config.model, folder)
