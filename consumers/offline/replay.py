"""Recorded batches are trained again, without a broker, and the outcome is compared with a later checkpoint.

A replay writes nothing. Ranks and threads are those of the run, since sums depend on them in their last bits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from consumers.trainer.checkpoint.batch_files import BatchFiles
from consumers.trainer.checkpoint.compare import Comparison
from consumers.trainer.checkpoint.store import CheckpointStore, leader_term_of, step_of
from consumers.trainer.data.groups import Group
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.rank_group import RankGroup
from consumers.trainer.step.build import build_learner
from schemas.config import ParallelConfig, TidemillConfig
from schemas.errors import ConfigError


@dataclass(frozen=True)
class ReplayPlan:
    """The steps [first, last) are trained from ``start`` (None: where the run began) to ``goal``, both checkpoints.

    world, parallel, threads, torch: ranks, how they shared the model, threads and PyTorch version that the run trained
    them with.
    """

    start: Path | None
    goal: Path
    first: int
    last: int
    world: int
    parallel: dict[str, int]
    threads: int
    torch: str


def plan_replay(config: TidemillConfig, first: int, last: int | None) -> ReplayPlan:
    """Plan a replay up to ``last``, by default the newest checkpoint; ConfigError if a file is missing or damaged."""
    checkpoints, batches = CheckpointStore(config.folder / "checkpoints"), BatchFiles(config.folder)
    goal = checkpoints.at(last)
    last = step_of(goal)
    if not 0 <= first < last:
        raise ConfigError(f"--from {first} must be 0 or more and before step {last}, which {goal.name} is of")
    # Before its first step a run has no checkpoint; it began with model.path.
    start = checkpoints.at(first) if first or 0 in checkpoints.steps() else None
    missing = sorted(set(range(first, last)) - batches.steps())
    if missing:
        raise ConfigError(
            f"the batches of {len(missing)} of the steps {first} to {last - 1} are not in {batches.folder}, the first"
            f" is {missing[0]}: they are kept with trainer.record: true, as long as the checkpoint before them"
        )
    setups = []
    for step in range(first, last):
        record = batches.read(step)
        if record.leader_term > leader_term_of(goal):
            raise ConfigError(
                f"{goal.name} is of weights that were given up: a later trainer trained step {step} again"
            )
        setups.append((record.world, record.parallel, record.threads, record.torch))
        if setups[0] != setups[-1]:
            raise ConfigError(
                f"other ranks, another trainer.parallel, other threads or another PyTorch trained from step {step} on:"
                " replay up to a checkpoint before it, or from one after it"
            )
    return ReplayPlan(start, goal, first, last, *setups[0])


def run_replay(
    config: TidemillConfig,
    plan: ReplayPlan,
    on_step: Callable[[int], None],
    before_step: Callable[[RankGroup, int], None] | None = None,
) -> Comparison | None:
    """Train and compare on every rank; rank 0 returns the comparison. before_step: gets the version trained next."""
    torch.set_num_threads(plan.threads)
    torch.manual_seed(config.run.seed)
    ranks = Ranks(config.trainer.rank_deadline_s, ParallelConfig(**plan.parallel))
    batches = BatchFiles(config.folder)
    with ranks.watchdog():
        rank_group = RankGroup(config, build_learner(config, ranks))
        if not ranks.is_main:
            rank_group.follow()
            return None
        if plan.start is not None:
            rank_group.load(plan.start)
        for step in range(plan.first, plan.last):
            record = batches.read(step)
            if before_step is not None:
                before_step(rank_group, record.version)
            groups = [
                Group(group.task_id, list(zip(group.samples, group.rewards, strict=True)), group.images)
                for group in record.groups
            ]
            rank_group.train(groups, record.version, lr=record.lr or None, steps=record.steps or None)
            on_step(step)
        answer = rank_group.compare(plan.goal)
        rank_group.dismiss()
    return answer
