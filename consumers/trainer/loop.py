"""The trainer's loop on a page: claim, journal, step, publish, free the slots; now and then a checkpoint.

Exactly once: a step's data is in the journal before it is trained, and is acknowledged only when a durable checkpoint
covers it. A restarted trainer replays the journal on the same data. If the broker loses data, the trainer
repairs it from what it knows, in the same process.
"""

import shutil
import time
from dataclasses import replace

import structlog

from broker.client import Broker
from broker.heartbeat import FRESH_S
from consumers.trainer.batch_source import QUIET_S, BatchSource, NothingToLearn
from consumers.trainer.checkpointing import Checkpointing
from consumers.trainer.context import TrainerContext
from consumers.trainer.data.groups import Batch
from consumers.trainer.distributed.device_turns import DeviceTurns
from consumers.trainer.generator_watches import MismatchWatch, RejectedWeightsWatch
from consumers.trainer.leadership import Leadership
from consumers.trainer.model.hf_weights import copy_tokenizer
from consumers.trainer.pause import PauseFollower
from consumers.trainer.publishing import WeightPublisher
from consumers.trainer.records.evaluation_log import best_versions, count_since_best
from consumers.trainer.step.learner import Learner
from consumers.trainer.step_log import StepLog
from schemas.config import TidemillConfig
from schemas.errors import BrokerLost, DiskError, RunFailed
from schemas.messages import BatchRecord
from schemas.system.device_lock import SHARE
from schemas.system.files import commit_folder, disk_errors
from schemas.system.lifecycle import StopFlag

EVAL_DEADLINE_S = 300.0
MOST_SKIPPED = 10
"""Skipped steps in a row that end the run."""

log = structlog.get_logger()


class Trainer:
    """A trainer process. progress: what its weights were trained on. finished: whether the run has all its steps."""

    def __init__(
        self, config: TidemillConfig, name: str, broker: Broker, step: Learner, turns: DeviceTurns | None = None
    ) -> None:
        self.config, self.broker, self.state, self.finished = config, broker, "starting", False
        self._turns = turns
        if turns is not None:
            turns.generators = lambda: broker.heartbeats.list_heard(FRESH_S, ("generator",))
        self.context = context = TrainerContext.create(config, name, broker, step, turns)
        self.session, self.rank_group = context.session, context.rank_group
        self.progress, self.timer = context.progress, context.timer
        self.skipped = 0
        self.step_log = StepLog(context)
        self.leadership = Leadership(context, self.step_log.evaluations)
        self.publisher = WeightPublisher(context, self.leadership)
        self.rejection_watch = RejectedWeightsWatch(context)
        self.mismatch_watch = MismatchWatch(context)
        self.checkpoints = Checkpointing(context)
        self.pause = PauseFollower(context, save=self.checkpoints.save_now)

    def describe(self) -> tuple[str, int, dict[str, float]]:
        """Return state, version and metrics for the heartbeat."""
        state = "paused" if self.pause.reasons else self.state
        rate = 0.0 if self.pause.reasons else self.step_log.tokens_per_s
        figures = {"step": float(self.progress.step), "tokens_per_s": rate}
        return state, self.progress.version, figures | (self._turns.clock.figures() if self._turns is not None else {})

    def run(self, stop: StopFlag) -> None:
        """Load, take over, replay, train, finish; take over once more if the broker loses data."""
        self.context.retry.stop = stop
        self.leadership.restore(from_checkpoint=self.checkpoints.load_latest())
        self.pause.restore()
        try:
            while not self.run_term(stop):
                # Work in progress has the old term; after the takeover the broker would reject it.
                self.publisher.abandon()
                self.checkpoints.abandon()
        finally:
            self.publisher.stop_serving()
            self.step_log.flush()

    def run_term(self, stop: StopFlag) -> bool:
        """Train as the only trainer until the end; False if the broker has lost data."""
        try:
            journaled = self.take_over()
            self.replay(journaled, stop)
            self.train(stop)
            self.finish(stop)
        except BrokerLost as error:
            self.leadership.lost(error)
            return False
        return True

    def take_over(self) -> list[BatchRecord]:
        """Become the only trainer; returns the steps to replay."""
        mended = self.leadership.take_over(self.checkpoints.step)
        self.step_log.write_resumed()
        self.batches = BatchSource(self.context, self.pause, on_idle=self.unblock_others)
        self.checkpoints.attach(self.batches.intake)
        if mended:
            self.checkpoints.save()
        self.publisher.publish()
        return self.checkpoints.replayable()

    def unblock_others(self) -> None:
        """While no batch comes, finish checkpoints, publish weights and write evaluations: others may wait for them.

        RunFailed if no generator can use the weights.
        """
        self.checkpoints.poll()
        self.publisher.publish()
        self.rejection_watch.check()
        self.step_log.write_evaluations()

    def replay(self, journaled: list[BatchRecord], stop: StopFlag) -> None:
        """Train the journaled steps that the weights lack, on the same data as before."""
        self.state = "replaying"
        for record in journaled:
            if self.pause.hold(stop) and stop:
                break
            log.info("replaying a journaled step", step=record.step)
            self.train_step(self.batches.replay(record))
            self.checkpoints.save_if_due()

    def train(self, stop: StopFlag) -> None:
        """Train batches as they come, until trainer.steps are done or the trainer is asked to stop."""
        self.state = "running"
        while self.progress.step < self.context.settings.steps and not stop:
            with self.timer.phase("wait"):
                try:
                    batch = self.batches.next(self.leadership.next_version(), stop)
                except NothingToLearn:
                    # The run ends, and these weights are its result.
                    self.checkpoints.save_final()
                    raise
            if batch is None:
                break
            self.train_step(batch)
            self.checkpoints.save_if_due()
            self.stop_early()

    def stop_early(self) -> None:
        """Make this step the run's last if eval.patience evaluations brought no better mean reward."""
        evaluation, lines = self.config.eval, self.step_log.evaluations.lines
        if evaluation is None or evaluation.patience is None or count_since_best(lines) < evaluation.patience:
            return
        step, best = self.progress.step, best_versions(lines)[0]
        if step < self.context.settings.steps and self.broker.ledger.change_settings({"steps": step}):
            self.context.settings.follow({**self.progress.settings, "steps": step})
            text = (
                f"the run ends at step {step}: the best of its evaluations is still that of version {best}, with a mean"
                f" reward of {lines[best]['mean']:.3f}"
            )
            self.context.notify("early_stop", "info", text)

    def train_step(self, batch: Batch) -> None:
        """Train one step. Its batch is in the journal already, and its slots are freed at the end."""
        with self.timer.phase("assemble"):
            settings = self.context.settings
            result = self.rank_group.train(
                batch.groups, self.progress.version, batch.record.step, lr=settings.lr, steps=settings.steps
            )
        # The rest of the phase: planning, sending, collating.
        parts = {name: seconds for name, seconds in result.seconds.items() if name not in ("other", "total")}
        self.timer.split("assemble", parts)
        self.skipped = self.skipped + 1 if result.skipped else 0
        if result.skipped:
            log.warning("step skipped: its loss or gradient is not finite", step=self.progress.step)
        if self.skipped == MOST_SKIPPED:
            raise RunFailed(f"{MOST_SKIPPED} steps in a row were skipped: their loss or gradient is not finite")
        self.checkpoints.trained(batch)
        self.progress.advance(batch.record)
        self.step_log.trained(batch)
        with self.timer.phase("publish"):
            self.publisher.publish()
        figures = {**batch.figures, **self.mismatch_watch.observe(batch, result)}
        if self._turns is not None:
            figures["perf/shared_gpu_share"] = self._turns.clock.figures()[SHARE]
            figures |= {f"perf/hand_over_{part}_s": seconds for part, seconds in self._turns.clock.parts.items()}
        self.step_log.finished(replace(batch, figures=figures), result)
        self.session.complete_step(batch.record, batch.solve_rates)

    def finish(self, stop: StopFlag) -> None:
        """Write a checkpoint, and the model if all steps are done."""
        self.checkpoints.save_final()
        self.publisher.abandon(tolerated=DiskError)
        if self.progress.step >= self.context.settings.steps:
            self.state = "finishing"
            self.publisher.publish(wait=True)
            if self.config.eval is not None:
                self.wait_for_evaluation(stop)
            if not stop:
                self.context.retry("model", self.export_model)
                self.session.finish_run()
                self.finished = True
        self.publisher.close()
        self.rank_group.dismiss(self.finished)
        self.step_log.close()

    def export_model(self) -> None:
        """Write the trained model with its tokenizer, whole or not at all; DiskError if the disk is full."""
        folder = self.config.folder / "model"
        aside = folder.with_name(".model.writing")
        shutil.rmtree(aside, ignore_errors=True)
        try:
            with disk_errors(f"cannot write the model {folder}"):
                self.rank_group.export(aside)
                copy_tokenizer(self.config.model, aside)
                commit_folder(aside, folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def wait_for_evaluation(self, stop: StopFlag) -> None:
        """Wait until the evaluation of these weights is complete; after the deadline, report that it is not.

        If the weights vanish in the meantime, they are published again, because a generator may not have them yet. If
        the broker loses the evaluation, it is repaired, and the evaluation is opened again. A drain waits for an
        evaluation that is open; otherwise it is opened after the pause, whose time does not count.
        """
        version = self.progress.version
        deadline, next_look = time.monotonic() + EVAL_DEADLINE_S, time.monotonic() + QUIET_S
        while not stop and time.monotonic() < deadline:
            if self.pause.hold(stop, drained=self.broker.evals.samples_left(version) is None):
                deadline = time.monotonic() + EVAL_DEADLINE_S
            position = self.broker.ledger.change_position()
            self.step_log.write_evaluations()
            if version in self.step_log.evaluations.lines:
                return
            if time.monotonic() > next_look:
                next_look = time.monotonic() + QUIET_S
                self.publisher.publish()
                self.step_log.check_evaluation(version)
            self.rank_group.give_if_due()
            self.broker.ledger.wait_change(position, 200)
        if not stop:
            text = f"the evaluation of version {version} was not complete after {EVAL_DEADLINE_S:.0f} s"
            log.warning(text)
            self.context.notify("evaluation", "warning", text)
