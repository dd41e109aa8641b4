"""The interface of every training step (tokens, PPO, SAC): all that ranks, checkpoints and the loop know of one."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from consumers.trainer.data.plan import StepPlanner
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.model.policy import Policy
from consumers.trainer.step.gradient_update import GradientUpdate, Schedule


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step. metrics: for logs. staleness: loss tokens by age in versions. skipped: no weight changed.

    seconds: of each phase, ``total`` and what is in none of them, ``other``. advantages: of each sample, on the rank
    that made the plan; empty if tokens have advantages of their own. samples: see StepMeter. A skipped step counts, and
    makes a version with the weights of the one before.
    """

    metrics: dict[str, float]
    staleness: dict[int, int]
    skipped: bool
    seconds: dict[str, float]
    advantages: Sequence[float] = ()
    samples: Mapping[int, npt.NDArray[np.float64]] = field(default_factory=dict)


@dataclass(eq=False)
class Learner(ABC):
    """A policy and how a step changes it; ``build_learner`` puts one together.

    planner: what makes batches of groups. policy: on its device, sharded over ``ranks`` if these are several. update:
    of the policy.
    """

    policy: Policy
    planner: StepPlanner
    update: GradientUpdate
    schedule: Schedule
    ranks: Ranks

    @abstractmethod
    def run(self, batch: Any, version: int) -> StepResult:
        """Take a step over a batch of the planner; ``version`` is that of the weights before it."""

    def parts(self) -> dict[str, tuple[nn.Module, GradientUpdate]]:
        """Return what is trained by its name in checkpoints; the policy is ``model``."""
        return {"model": (self.policy, self.update)}

    def frozen(self) -> Sequence[nn.Module]:
        """Return the models beside, which no step changes."""
        return ()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs beside tensors, as JSON; files that it names stay as they are. DiskError."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:  # noqa: B027 - most have nothing to do
        """Continue from a checkpoint's state; InfraError if a file that it names is damaged."""
