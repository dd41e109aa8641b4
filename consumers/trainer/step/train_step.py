"""The optimizer step: micro-batches in, a weight update and its metrics out.

The step knows neither the broker nor which algorithm it runs. Gradients are sums of weighted token
losses, so they don't depend on how the batch was cut. A step whose loss or gradient is not finite
changes no weight and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from consumers.trainer.algorithms.objective import Objective
from consumers.trainer.data.plan import StepBatch, StepPlanner
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.metrics.expert_load import ExpertLoad
from consumers.trainer.metrics.step_metrics import StepMeter, sample_metrics
from consumers.trainer.metrics.timing import StepTimer
from consumers.trainer.model.policy import Policy
from consumers.trainer.step.critic import CriticStep
from consumers.trainer.step.gradient_update import GradientUpdate
from consumers.trainer.step.optimizer import Schedule
from consumers.trainer.step.prepare import Preparation, Prepared


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step. metrics: for logs. staleness: loss tokens by age in versions. skipped: no weight changed.

    seconds: of each phase, ``total`` and what is in none of them, ``other``. advantages: of each sample, on the rank
    that made the plan; empty where tokens have their own.

    A skipped step is a step all the same: it makes a version of its own, with the weights of the one before.
    """

    metrics: dict[str, float]
    staleness: dict[int, int]
    skipped: bool
    seconds: dict[str, float]
    advantages: Sequence[float] = ()


class TrainStep:
    """An optimizer step, from micro-batches to changed weights and metrics; ``build_train_step`` puts it together::

        step = build_train_step(config)
        batch = step.planner.plan(groups).batch()
        result = step.run(batch, version=7)      # the policy is version 8 now

    planner: what makes batches of groups. policy: on its device, sharded over ``ranks`` if these are several.
    """

    def __init__(
        self,
        policy: Policy,
        planner: StepPlanner,
        preparation: Preparation,
        objective: Objective,
        update: GradientUpdate,
        schedule: Schedule,
        ranks: Ranks,
    ) -> None:
        self.policy = policy
        self.planner = planner
        self.preparation = preparation
        self.objective = objective
        self.update = update
        self.schedule = schedule
        self.ranks = ranks
        self.expert_load = ExpertLoad(policy)

    @property
    def critic(self) -> CriticStep | None:
        """The critic that gives values to the advantages, if there is one."""
        return self.preparation.critic

    def run(self, batch: StepBatch, version: int) -> StepResult:
        """Update the weights once; ``version`` is that of the weights before the step."""
        timer = StepTimer()
        with timer.phase("prepare"):
            micro_batches = [micro.to(self.policy.device) for micro in batch.micro_batches]
            prepared = self.preparation.run(self.policy, micro_batches, version, self.ranks.all_reduce_sum)
        lr = self.schedule.at(self.schedule.done + 1)
        with timer.phase("optimizer"):
            update = self.update.run(lambda: self._accumulate(prepared, version, timer), lr)
        meter = update.sums
        with timer.phase("critic"):
            critic_metrics = self._train_critic(prepared, meter.sums["tokens"])
        # A skipped step counts: the schedule follows the steps of the run.
        self.schedule.done += 1
        metrics = {
            **(sample_metrics(batch.plan) if batch.plan else {}),
            **meter.result(),
            **self.expert_load.result(self.ranks.sum_over_ranks),
            **(replay.result(self.ranks.sum_over_ranks) if (replay := self.policy.router_replay) else {}),
            **critic_metrics,
            "grad_norm": update.norm,
            "lr": lr,
            "skipped": float(update.skipped),
            **self.update.metrics(),
        }
        one_each = batch.plan is not None and self.preparation.token_advantage is None
        advantages = batch.plan.credit.samples.tolist() if one_each and batch.plan else ()
        return StepResult(metrics, dict(sorted(meter.staleness.items())), update.skipped, timer.lap(), advantages)

    def _accumulate(self, prepared: Sequence[Prepared], version: int, timer: StepTimer) -> StepMeter:
        """Run forward and backward for each micro-batch; returns the metrics of this rank."""
        meter = StepMeter(version)
        for part in prepared:
            with timer.phase("forward"):
                loss = self._forward(part, meter)
            with timer.phase("backward"):
                self.update.backward(loss)
        return meter

    def _forward(self, part: Prepared, meter: StepMeter) -> Tensor:
        """Compute this micro-batch's part of the step's loss, with its gradient graph."""
        micro = part.micro
        scores = self.policy(
            micro.tokens,
            micro.targets,
            micro.mask,
            micro.lengths,
            temperatures=micro.temperatures,
            entropy_gradient=self.objective.entropy_coef != 0.0,
            images=micro.images,
            routed_experts=micro.routed_experts,
        )
        output = self.objective(part.inputs(scores.logprobs), scores.entropy, meter.version)
        loss = torch.where(micro.mask, output.loss * micro.weights, 0.0).sum()
        meter.add(micro, scores, output, loss)
        return loss

    def _train_critic(self, prepared: Sequence[Prepared], tokens: float) -> dict[str, float]:
        """Train the critic, if there is one, on the step's returns; returns its metrics."""
        if self.critic is None:
            return {}
        parts = [
            (part.micro, part.values, part.returns)
            for part in prepared
            if part.values is not None and part.returns is not None
        ]
        self.critic.steps = self.schedule.steps
        return self.critic.run(parts, tokens, self.schedule.done)
