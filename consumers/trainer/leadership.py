"""The takeover by which a process becomes the only trainer of a run, and the check that another one did.

The broker counts the trainers of a run: each has a leader term, and the broker refuses what an older term writes. The
file LEADER_TERM beside the checkpoints keeps the newest term for a broker that forgot it, and the highest version that
may have been published: a number that named weights names no others, even if those weights are lost.

What the trainer knows, from its newest checkpoint or from its own memory, decides: a broker that knows less is
repaired.
"""

import fcntl
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from broker.evaluations.store import KEPT_EVALUATIONS
from broker.flow.fencing import term_number
from broker.flow.owner import Owner
from broker.flow.progress import TakeoverRequest
from consumers.trainer.context import TrainerContext
from consumers.trainer.records.evaluation_log import EvaluationLog
from schemas.errors import BrokerDamaged, BrokerLost, ConfigError, FencedError
from schemas.run_record import claim_folder, record_file
from schemas.system.files import atomic_write, disk_errors, make_folder

LOCK_S = 5.0
"""Seconds that a trainer waits for another one that is writing the file; it takes milliseconds."""

log = structlog.get_logger()


@dataclass(frozen=True)
class LeaderRecord:
    """The content of LEADER_TERM: the newest trainer's term, and the highest version it may have published."""

    leader_term: str
    version: int


class Leadership:
    """A trainer's claim to be the only one of its run: ``restore`` once, ``take_over``, and again after ``lost``.

    evaluations: with which a broker that forgot them is repaired. leader_term: this trainer's, once it has taken over.
    published: highest version that was or may have been published.
    """

    def __init__(self, context: TrainerContext, evaluations: EvaluationLog) -> None:
        self._context = context
        self._evaluations = evaluations
        self._file = context.rank_group.checkpoint_store.folder / "LEADER_TERM"
        self._fresh = True
        self.leader_term = "0-none"
        self.published = 0

    @property
    def number(self) -> int:
        """Number of the leader term."""
        return term_number(self.leader_term)

    def next_version(self) -> int:
        """Return the version that the next step makes: above all numbers that weights may have, also lost ones."""
        return max(self._context.progress.version, self.published) + 1

    def restore(self, from_checkpoint: bool) -> None:
        """Find the run's id and published versions, after any load; ConfigError if the checkpoint is another run's."""
        context = self._context
        record = claim_folder(context.config)
        if context.progress.run_id not in ("", record.id):
            raise ConfigError(
                f"the checkpoints in {self._file.parent} are of another run than {record_file(context.config.folder)}"
                " says: restore the folder as it was"
            )
        context.progress.run_id = record.id
        found = self.read()
        # Without the file it is unknown what was published since the checkpoint.
        unknown = context.config.trainer.checkpoint.most_uncovered if from_checkpoint and found is None else 0
        self.published = max(context.progress.version + unknown, found.version if found else 0)
        self._fresh = found is None and not from_checkpoint

    def take_over(self, saved: int) -> bool:
        """Become the trainer; return whether the broker had to be repaired. saved: the step that checkpoints cover.

        FencedError if a newer trainer has used the folder.
        """
        context, progress = self._context, self._context.progress
        takeover = context.session.take_over(self._request(saved))
        self.leader_term = takeover.leader_term
        context.retry("leader_term", lambda: self.reserve_version(progress.version))
        context.rank_group.checkpoint_store.sweep(self.number)
        progress.broker_lifetime, progress.started = takeover.broker_lifetime, takeover.started
        if takeover.refused_settings:
            flow, batch = context.config.flow, context.config.trainer.batch_groups
            text = (
                f"the changed settings ({takeover.refused_settings}) leave no room for a batch with flow.window"
                f" {flow.window}: the configuration's staleness {flow.staleness} and batch {batch} are in force"
            )
            context.notify("settings", "warning", text)
        if takeover.lost:
            progress.version = max(progress.version, takeover.version)
            if twice := takeover.surplus:
                text = f"the repaired ledger counts {twice} prompt groups twice: compare the run's log with it"
                context.notify("ledger", "error", text)
            text = f"the broker was repaired; training resumes at step {progress.step}"
            context.notify("broker_mended", "warning", text)
        return takeover.lost

    def lost(self, error: BrokerLost) -> None:
        """Prepare for a new takeover after the broker lost data; FencedError if another trainer has taken over."""
        log.warning("the broker is compared with what is in the weights", reason=str(error))
        self._check()
        self._fresh = False
        if isinstance(error, BrokerDamaged):
            # Its lifetime ends here: everything that is not in the weights is made again.
            self._context.progress.broker_lifetime = ""

    def reserve_version(self, version: int) -> None:
        """Record on disk, before a version is visible, that it may be published. DiskError if the disk is full.

        FencedError, and nothing is written, if another trainer has used the folder since this one took over. The record
        outlives a loss of power, as generators' weights may.
        """
        with disk_errors(f"cannot write {self._file}"), _alone(self._file):
            self._check()
            self.published = max(self.published, version)
            content = json.dumps(asdict(LeaderRecord(self.leader_term, self.published)))
            atomic_write(self._file, content, durable=True)

    def read(self) -> LeaderRecord | None:
        """Return what the last leader recorded in its file; None if there is no readable record."""
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
            return LeaderRecord(str(found["leader_term"]), int(found["version"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _request(self, saved: int) -> TakeoverRequest:
        config, progress, found = self._context.config, self._context.progress, self.read()
        return TakeoverRequest(
            batch=config.trainer.batch_groups,
            staleness=config.flow.staleness,
            window=config.flow.window,
            steps=config.trainer.steps,
            max_uncommitted=config.trainer.checkpoint.most_uncovered,
            owner=Owner.of(progress.run_id, config.folder),
            progress=progress,
            fresh=self._fresh,
            leader_term_floor=term_number(found.leader_term) if found else 0,
            saved=saved,
            evaluations=list(self._evaluations.lines.values())[-KEPT_EVALUATIONS:],
            version_if_lost=progress.version if self.published <= progress.version else self.published + 1,
        )

    def _check(self) -> None:
        """Raise FencedError if another trainer has used the folder since this one took over."""
        found = self.read()
        newer = found is not None and term_number(found.leader_term) >= self.number
        if found is not None and newer and found.leader_term != self.leader_term:
            raise FencedError(f"trainer {self.leader_term} was replaced by {found.leader_term} and stops")


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Keep other trainers from checking and then writing ``file`` during the block; OSError if the disk is full.

    A trainer that froze with the lock is not waited for: the broker refuses it anyway. On a file system without locks
    the block runs without one.
    """
    make_folder(file.parent)
    with file.with_name(f"{file.name}.lock").open("w") as lock:
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    log.warning("another trainer does not release the lock of its file", file=str(file))
                    break
            except OSError:
                break
            time.sleep(0.01)
        yield
