"""When checkpoints are written, and what the broker may forget after one: the data of the steps that it covers.

Until then the record of a step is kept here, and its data in the broker, where a restarted trainer reads it again. With
trainer.record, the data of every step is also in a file, for ``tidemill replay``.
"""

from functools import partial

import structlog

from broker.flow.fencing import term_number
from consumers.trainer.checkpoint.batch_files import BatchFiles, step_record
from consumers.trainer.context import TrainerContext
from consumers.trainer.data.groups import Batch
from consumers.trainer.group_intake import GroupIntake
from schemas.errors import DiskError
from schemas.messages import BatchRecord

log = structlog.get_logger()


class Checkpointing:
    """The checkpoints of one trainer, one at a time. step: the step up to which they are durable."""

    def __init__(self, context: TrainerContext) -> None:
        self._context = context
        self._rank_group = context.rank_group
        self._session = context.session
        self._progress = context.progress
        self._batch_files = BatchFiles(context.config.folder)
        self._records = context.config.trainer.record
        self._keeps_best = context.config.trainer.checkpoint.keep_best > 0
        self._intake: GroupIntake | None = None
        self._uncommitted: list[BatchRecord] = []
        self._pending: int | None = None
        """The step of the checkpoint that is being written."""
        self.step = 0

    def load_latest(self) -> bool:
        """Load the newest whole checkpoint into weights and progress; True if there is one."""
        path, refused = self._rank_group.checkpoint_store.newest()
        for problem in refused:
            log.warning("a damaged checkpoint is not used", problem=problem)
        if path is None:
            return False
        restored = self._rank_group.load(path)
        self._progress.restore(restored.step, restored.version, restored.extra)
        self.step = restored.step
        log.info("resumed from a checkpoint", step=restored.step)
        if restored.difference:
            log.warning(restored.difference)
            self._context.notify("critic", "warning", restored.difference)
        return True

    def attach(self, intake: GroupIntake) -> None:
        """Note after a take-over that ``intake`` has the data of the steps to come."""
        self._intake = intake
        self._uncommitted = []

    def replayable(self) -> list[BatchRecord]:
        """Let the broker forget what a checkpoint covers; returns the journaled steps that the weights lack."""
        records = [record for _, record in sorted(self._session.read_journal().items())]
        self._session.commit_steps([record for record in records if record.step < self.step])
        self._uncommitted = [record for record in records if self.step <= record.step < self._progress.step]
        if self._intake is not None:
            self._intake.keep_uncommitted(self._uncommitted)
        return [record for record in records if record.step >= self._progress.step]

    def trained(self, batch: Batch) -> None:
        """Note a step that is in the weights and in no checkpoint; with trainer.record, write its batch to a file."""
        self._uncommitted.append(batch.record)
        if self._records:
            with self._context.timer.phase("record"):
                ranks, settings = self._rank_group.ranks, self._context.settings
                record = step_record(
                    batch.groups,
                    step=batch.record.step,
                    version=self._progress.version,
                    leader_term=term_number(self._session.leader_term),
                    world=ranks.world,
                    parallel=ranks.layout.parallel,
                    lr=settings.lr,
                    steps=settings.steps,
                )
                self._context.retry("batches", partial(self._batch_files.write, record))

    def save_if_due(self) -> None:
        """Begin a checkpoint after every trainer.checkpoint.every steps, counted from the last.

        With trainer.checkpoint.keep_best, each evaluated version gets one as well. A checkpoint is written
        during training, and the next one waits for it: the broker holds at most twice as many steps.
        """
        with self._context.timer.phase("checkpoint"):
            self.poll()
            last = self.step if self._pending is None else self._pending
            steps = self._progress.step - last
            due = steps >= self._context.settings.checkpoint_every
            if due or (steps and self._keeps_best and self._is_evaluated()):
                self._finish_pending()
                self._context.retry("checkpoint", self._begin)
                self.poll()

    def _is_evaluated(self) -> bool:
        """Return whether the current version will be evaluated; the last one is, too."""
        every = self._context.settings.eval_every
        return every is not None and self._progress.version % every == 0

    def poll(self) -> None:
        """Let the broker forget what the pending checkpoint covers, if it is durable now; does not wait."""
        if self._pending is not None and not self._rank_group.saving:
            self._finish_pending()

    def save_now(self) -> None:
        """Make all steps so far durable, unless they are already, and report it."""
        self._finish_pending()
        if self._progress.step != self.step:
            self.save()
        self._context.notify("checkpoint", "info", f"a checkpoint covers step {self._progress.step}")

    def save_final(self) -> None:
        """Make the steps that no checkpoint covers durable."""
        self._finish_pending()
        if self._uncommitted:
            self.save()

    def save(self) -> None:
        """Make all steps so far durable, and then let the broker forget them."""
        self._finish_pending()
        self._context.retry("checkpoint", self._finish_or_write)

    def abandon(self) -> None:
        """Wait for the pending checkpoint after the broker was lost, and let the broker forget nothing."""
        try:
            self._wait_written()
        except DiskError as error:
            log.warning("a checkpoint was not written", error=str(error))

    def _finish_pending(self) -> None:
        """Wait for the pending checkpoint; if the disk was full, retry with a new one."""
        if self._pending is None:
            return
        try:
            self._finish_or_write()
        except DiskError as error:
            self._context.retry.report("checkpoint", error)
            self._context.retry("checkpoint", self._finish_or_write)

    def _finish_or_write(self) -> None:
        """Finish the pending checkpoint, or else write one, and let the broker forget what it covers."""
        if self._pending is None:
            self._begin()
        self._wait_written()
        if self._records:
            self._batch_files.remove_before(self._rank_group.checkpoint_store.oldest_step())
        covered = [record for record in self._uncommitted if record.step < self.step]
        self._session.commit_steps(covered)
        if self._intake is not None:
            self._intake.forget_covered(covered)
        self._uncommitted = [record for record in self._uncommitted if record.step >= self.step]

    def _wait_written(self) -> None:
        """Wait for the pending checkpoint; DiskError if the disk was full. Afterwards none is pending."""
        pending, self._pending = self._pending, None
        self._rank_group.wait_saved()
        if pending is not None:
            self.step = pending

    def _begin(self) -> None:
        """Begin a checkpoint of the current state, after the traces of its steps, which are not trained again."""
        self._context.traces.flush()
        progress = self._progress
        pipeline = self._session.read_pipeline()
        progress.update(pipeline)
        progress.prompts = self._session.read_prompts()
        if pipeline.step > progress.step:
            # Between replays: steps still to be replayed are not in these weights, though their slots are free.
            progress.mark_unfinished(
                [record for step, record in self._session.read_journal().items() if step >= progress.step]
            )
        self._rank_group.save(
            step=progress.step,
            version=progress.version,
            leader_term=term_number(self._session.leader_term),
            extra=progress.to_json(),
            evaluated=self._is_evaluated(),
        )
        self._pending = progress.step
