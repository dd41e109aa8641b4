"""The objects that all parts of a trainer share, among them settings that change, and the retry on a full disk."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Self

import structlog

from broker.client import Broker
from broker.device_clock import DeviceClock, DeviceUse
from broker.flow.progress import Progress
from broker.flow.trainer_session import TrainerSession
from consumers.trainer.distributed.device_turns import DeviceTurns
from consumers.trainer.metrics.timing import StepTimer
from consumers.trainer.rank_group import RankGroup
from consumers.trainer.records.traces import TraceLog
from consumers.trainer.records.trackers import Notify
from consumers.trainer.step.learner import Learner
from schemas.config import TidemillConfig
from schemas.errors import DiskError
from schemas.messages import Event
from schemas.system.lifecycle import StopFlag

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 10.0
USES: Mapping[str, DeviceUse] = {
    "assemble": "compute",
    "publish": "load",
    "record": "load",
    "checkpoint": "load",
    "hand_over": "load",
    "paused": "pause",
}
"""What the devices do in a phase of a step; in all others they wait."""

log = structlog.get_logger()


class DiskRetry:
    """Retries writes to a full disk. Training waits, because the broker would otherwise hold ever more data.

    stop: the trainer's flag, once the trainer runs; a trainer that is asked to stop does not wait.
    """

    def __init__(self, deadline_s: float, notify: Notify) -> None:
        self._deadline_s = deadline_s
        self._notify = notify
        self.stop = StopFlag()

    def __call__(self, what: str, act: Callable[[], None]) -> None:
        """Call ``act``, and retry while it raises DiskError; raise it after the deadline or if asked to stop."""
        deadline = time.monotonic() + self._deadline_s
        wait = FIRST_WAIT_S
        while True:
            try:
                return act()
            except DiskError as error:
                if self.stop or time.monotonic() > deadline:
                    raise
                self.report(what, error)
            self.stop.wait(wait)
            wait = min(2 * wait, LONGEST_WAIT_S)

    def report(self, what: str, error: DiskError) -> None:
        """Report that there is no room for ``what``, and that the write will be retried."""
        log.warning("waiting for room", writing=what, error=str(error))
        self._notify(what, "error", str(error))


def describe_broken(version: int) -> str:
    """Say that no service can use the weights of this version."""
    return f"weights version {version} are numerically broken: they give log-probabilities that are not finite"


class LiveSettings:
    """Settings that users change during the run; ``follow`` gets them from the broker between two steps."""

    def __init__(self, config: TidemillConfig) -> None:
        self._config = config
        self._changed: Mapping[str, float] = {}

    def follow(self, changed: Mapping[str, float]) -> None:
        """Use the settings that users have changed; the others are as configured."""
        if changed != self._changed:
            log.info("settings changed", **{name: changed.get(name) for name in {*changed, *self._changed}})
            self._changed = dict(changed)

    @property
    def lr(self) -> float:
        """Peak learning rate, which the schedule scales."""
        return self._changed.get("lr", self._config.trainer.optimizer.lr)

    @property
    def steps(self) -> int:
        """The run's number of steps, as last set."""
        return int(self._changed.get("steps", self._config.trainer.steps))

    @property
    def eval_every(self) -> int | None:
        """Weight versions between two evaluations; None without held-out prompts."""
        evaluation = self._config.eval
        return None if evaluation is None else int(self._changed.get("eval_every", evaluation.every))

    @property
    def checkpoint_every(self) -> int:
        """Steps between two checkpoints, as last set."""
        return int(self._changed.get("checkpoint_every", self._config.trainer.checkpoint.every))


@dataclass(frozen=True)
class TrainerContext:
    """The configuration and the objects of which a trainer has one each.

    session: this trainer's fenced access to the run. rank_group: computes on all ranks. progress: what the weights were
    trained on. timer: where a step's time goes. clock: where that of the devices goes, of all ranks. settings: those
    that change during the run. notify: reports an event through the broker. traces: of episodes.
    """

    config: TidemillConfig
    broker: Broker
    session: TrainerSession
    rank_group: RankGroup
    progress: Progress
    timer: StepTimer
    clock: DeviceClock
    settings: LiveSettings
    retry: DiskRetry
    notify: Notify
    traces: TraceLog = field(default_factory=TraceLog)

    @classmethod
    def create(
        cls, config: TidemillConfig, name: str, broker: Broker, step: Learner, turns: DeviceTurns | None = None
    ) -> Self:
        """Make the context of a trainer that has not loaded anything yet. turns: given if generators share its GPUs."""
        clock = DeviceClock(step.ranks.world)

        def entered(phase: str) -> None:
            clock.turn("asleep" if turns is not None and not turns.holding else USES.get(phase, "wait"))

        timer = StepTimer(entered=entered)

        def notify(event: str, level: Literal["info", "warning", "error"], text: str) -> None:
            broker.events.emit(Event(name=event, service=name, level=level, text=text))

        return cls(
            config=config,
            broker=broker,
            session=broker.trainer_session(),
            rank_group=RankGroup(config, step, turns, timer),
            progress=Progress(),
            timer=timer,
            clock=clock,
            settings=LiveSettings(config),
            retry=DiskRetry(config.trainer.checkpoint.deadline_s, notify),
            notify=notify,
            traces=TraceLog(config.trace, config.run.name, config.model.path),
        )
