"""The trainer as a process: the model, the ranks around it, and on rank 0 the loop."""

import os
import sys

import structlog
import torch

from broker.client import Broker
from broker.heartbeat import HeartbeatThread
from consumers.trainer.distributed.device_turns import DeviceTurns
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.loop import Trainer
from consumers.trainer.rank_group import RankGroup
from consumers.trainer.records.trackers import check_trackers
from consumers.trainer.step.build import build_learner
from schemas.config import TidemillConfig
from schemas.errors import OK_EXIT
from schemas.system.device_lock import SharedGpus
from schemas.system.lifecycle import StopFlag


def run_trainer(config: TidemillConfig, name: str) -> None:
    """Train until trainer.steps are done or a rank is asked to end; either way, write a checkpoint.

    Of several ranks (torchrun), rank 0 is the trainer that other services see, and the other ranks follow it. If a rank
    of another machine was asked, this machine ends with ``UNFINISHED_EXIT``, so that who started it starts it again.
    """
    check_trackers(config.trainer.trackers)
    stop = StopFlag().install()
    torch.manual_seed(config.run.seed)
    ranks = Ranks.of(config.trainer)
    if ranks.world > 1:
        structlog.contextvars.bind_contextvars(rank=ranks.rank)
    with ranks.watchdog(stop):
        finished = _train(config, name, ranks, stop)
    code = OK_EXIT if finished else stop.unfinished_code
    if code != OK_EXIT and os.environ.get("LOCAL_RANK", "0") == "0":
        # One rank of a machine tells it: torchrun kills the others then, and rank 0 is the last of its machine to end.
        sys.exit(code)


def _train(config: TidemillConfig, name: str, ranks: Ranks, stop: StopFlag) -> bool:
    shared = SharedGpus.from_environment()
    turns = DeviceTurns(shared, ranks.is_main) if shared is not None else None
    if turns is not None:
        turns.hold()
    with stop.ending_within(0.0):
        step = build_learner(config, ranks)
        broker = Broker.connect(config) if ranks.is_main else None
    if broker is None:
        # If asked to end, it tells rank 0, and continues until that has saved, which needs all ranks.
        return RankGroup(config, step, turns).follow()
    trainer = Trainer(config, name, broker, step, turns)
    heartbeat = HeartbeatThread(
        broker,
        name,
        "trainer",
        trainer.describe,
        acknowledged=lambda: trainer.pause.acknowledged,
        probes=config.probes,
        clock=trainer.context.clock,
    )
    trainer.pause.changed = heartbeat.soon
    with heartbeat:
        trainer.run(stop)
    return trainer.finished
