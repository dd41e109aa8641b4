"""How a run ends whose steps are done: its last evaluation is waited for, and its model is written."""

from __future__ import annotations

import time

import structlog

from broker.client import Broker
from broker.flow.progress import Progress
from consumers.trainer.disk_retry import Tell
from consumers.trainer.model.hf_weights import copy_tokenizer
from consumers.trainer.pause import PauseFollower
from consumers.trainer.rank_group import RankGroup
from schemas.config import TidemillConfig
from schemas.lifecycle import StopFlag

EVAL_DEADLINE_S = 300.0

log = structlog.get_logger()


def wait_for_evaluation(broker: Broker, heed: PauseFollower, progress: Progress, stop: StopFlag, tell: Tell) -> None:
    """Until the evaluation of these weights is complete, or the deadline, of which people are told."""
    deadline = time.monotonic() + EVAL_DEADLINE_S
    while not stop and time.monotonic() < deadline:
        if heed.hold(stop, progress):
            deadline = time.monotonic() + EVAL_DEADLINE_S
        position = broker.ledger.change_position()
        if any(result.version == progress.version and result.complete for result in broker.evals.results()):
            return
        broker.ledger.wait_change(position, 200)
    if stop:
        return
    text = f"the evaluation of version {progress.version} was not complete after {EVAL_DEADLINE_S:.0f} s"
    log.warning(text)
    tell("evaluation", "warning", text)


def write_model(config: TidemillConfig, crew: RankGroup) -> None:
    """The trained model in the run's folder, ready for transformers and vLLM."""
    folder = config.folder / "model"
    crew.export(folder)
    copy_tokenizer(config.model, folder)
