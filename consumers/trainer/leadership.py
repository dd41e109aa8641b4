"""Who the newest trainer of a run is, in the file LEADER_TERM beside the checkpoints: also when the broker forgot it.

And the highest version it may have published: a number that named weights names no others, even when they are lost.

How a process becomes the one trainer of a run: of one that begins, one that goes on, or one the broker forgot.

What the trainer knows counts, from its newest checkpoint or from its own life; where the broker knows less, it is
mended.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import structlog

from broker.flow.fencing import term_number
from broker.flow.progress import Progress, TakeoverRequest
from broker.flow.trainer_session import TrainerSession
from consumers.trainer.disk_retry import DiskRetry, Tell
from consumers.trainer.rank_group import RankGroup
from schemas.config import TidemillConfig
from schemas.errors import BrokerDamaged, BrokerLost, DiskError, FencedError


@dataclass(frozen=True)
class Seen:
    """The newest trainer that used this folder: its term, and the highest version it may have published."""

    leader_term: str
    version: int

    @property
    def number(self) -> int:
        return term_number(self.leader_term)


class Incarnation:
    """This trainer's ``leader_term``, and ``floor``: the highest version that was or may have been published."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "LEADER_TERM"
        self.leader_term = "0-none"
        self.floor = 0

    @property
    def number(self) -> int:
        """Which trainer of the run this is."""
        return term_number(self.leader_term)

    def read(self) -> Seen | None:
        """What the file says; None when there is none, or none that can be read."""
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
            return Seen(str(found["leader_term"]), int(found["version"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def begin(self, leader_term: str, version: int) -> None:
        """From now on this trainer is ``leader_term``; durable. Errors as of ``publishes``."""
        self.leader_term = leader_term
        self._raise(version, durable=True)

    def publishes(self, version: int) -> None:
        """Before a version may be seen by anybody. DiskError if the disk is full.

        FencedError, and nothing is written, if another trainer has used the folder since this one began.
        """
        self._raise(version, durable=False)

    def check(self) -> None:
        """FencedError if another trainer has used the folder since this one began."""
        seen = self.read()
        if seen is not None and seen.leader_term != self.leader_term and seen.number >= self.number:
            raise FencedError(f"trainer {self.leader_term} was replaced by {seen.leader_term} and stops")

    def _raise(self, version: int, durable: bool) -> None:
        self.check()
        self.floor = max(self.floor, version)
        aside = self._file.with_suffix(".writing")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with aside.open("w", encoding="utf-8") as stream:
                stream.write(json.dumps({"leader_term": self.leader_term, "version": self.floor}))
                if durable:
                    stream.flush()
                    os.fsync(stream.fileno())
            os.replace(aside, self._file)
        except OSError as error:
            raise DiskError(f"cannot write {self._file}: {error}") from error


log = structlog.get_logger()


class Succession:
    """``recover`` once, then ``take_over``; and after ``lost`` again."""

    def __init__(
        self,
        config: TidemillConfig,
        crew: RankGroup,
        training: TrainerSession,
        progress: Progress,
        term_number: Incarnation,
        patience: DiskRetry,
        tell: Tell,
    ) -> None:
        self._config = config
        self._crew = crew
        self._training = training
        self._progress = progress
        self._incarnation = term_number
        self._patience = patience
        self._tell = tell
        self._fresh = True

    def recover(self) -> int:
        """Load the newest checkpoint, if there is one; the step up to which it goes."""
        progress, floor = self._progress, 0
        newest = self._crew.checkpoints.newest()
        for refused in newest.refused:
            log.warning("a damaged checkpoint is not used", problem=refused)
        seen = self._incarnation.read()
        if newest.path is not None:
            restored = self._crew.load(newest.path)
            progress.restore(restored.step, restored.version, restored.extra)
            log.info("resumed from a checkpoint", step=restored.step)
            # Without the file nobody knows what was published since.
            floor = self._config.trainer.checkpoint.most_uncovered if seen is None else 0
        self._incarnation.floor = max(progress.version + floor, seen.version if seen else 0)
        self._fresh = seen is None and newest.path is None
        return progress.step

    def take_over(self, saved: int) -> bool:
        """Become the trainer; whether the broker had lost something and was mended.

        saved: the step up to which checkpoints go.
        """
        progress, seen, floor = self._progress, self._incarnation.read(), self._incarnation.floor
        request = TakeoverRequest(
            batch=self._config.trainer.batch_groups,
            staleness=self._config.flow.staleness,
            window=self._config.flow.window,
            steps=self._config.trainer.steps,
            every=self._config.trainer.checkpoint.most_uncovered,
            progress=progress,
            fresh=self._fresh,
            leader_term_floor=seen.number if seen else 0,
            saved=saved,
            version_if_lost=progress.version if floor <= progress.version else floor + 1,
        )
        takeover = self._training.begin(request)
        self._patience("leader_term", lambda: self._incarnation.begin(takeover.leader_term, progress.version))
        self._crew.checkpoints.sweep(self._incarnation.number)
        progress.broker_lifetime, progress.started = takeover.broker_lifetime, takeover.started
        if takeover.lost:
            progress.version = max(progress.version, takeover.version)
            if takeover.surplus:
                text = f"the mended ledger counts {takeover.surplus} prompt groups twice: compare the run's log with it"
                self._tell("ledger", "error", text)
            text = f"the broker was mended; training goes on at step {progress.step}"
            self._tell("broker_mended", "warning", text)
        return takeover.lost

    def lost(self, error: BrokerLost) -> None:
        """The broker has forgotten something: take over anew. FencedError if another trainer has done that."""
        log.warning("the broker is compared with what is in the weights", reason=str(error))
        self._incarnation.check()
        self._fresh = False
        if isinstance(error, BrokerDamaged):
            # Its broker_lifetime ends here: everything that is not in the weights is made again.
            self._progress.broker_lifetime = ""
