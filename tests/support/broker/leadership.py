"""A trainer's leadership of a run, without the trainer's model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Literal, cast

from broker.client import Broker
from broker.device_clock import DeviceClock
from broker.flow.progress import Progress
from consumers.trainer.checkpoint.store import CheckpointStore
from consumers.trainer.context import DiskRetry, LiveSettings, TrainerContext
from consumers.trainer.leadership import Leadership
from consumers.trainer.metrics.timing import StepTimer
from consumers.trainer.rank_group import RankGroup
from consumers.trainer.records.evaluation_log import EvaluationLog
from schemas.config import TidemillConfig
from schemas.messages import Event
from tests.support.configurations import minimal_config


def configuration_in(folder: Path, window: int = 1) -> TidemillConfig:
    """Of a run in this folder."""
    return minimal_config(
        run={"folder": str(folder)}, model={"path": "m"}, trainer={"steps": 9}, flow={"window": window}
    )


def leadership_in(folder: Path, broker: Broker, window: int = 1, run_id: str = "") -> Leadership:
    """Of a trainer without a model. run_id: that of the checkpoint it has loaded."""
    config = configuration_in(folder, window)
    rank_group = cast(RankGroup, SimpleNamespace(checkpoint_store=CheckpointStore(folder)))
    retry = DiskRetry(0.0, lambda *_: None)
    session, progress, timer = broker.trainer_session(), Progress(run_id=run_id), StepTimer()

    def notify(name: str, level: Literal["info", "warning", "error"], text: str) -> None:
        broker.events.emit(Event(name=name, service="trainer", level=level, text=text))

    context = TrainerContext(
        config, broker, session, rank_group, progress, timer, DeviceClock(), LiveSettings(config), retry, notify
    )
    return Leadership(context, EvaluationLog(folder))
