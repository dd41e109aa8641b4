"""The optimizer step: micro-batches in, a weight update and its metrics out.

It makes one update for each minibatch, in as many epochs as configured. Gradients are sums of weighted token losses, so
they don't depend on how a minibatch was cut. An update whose loss or gradient is not finite changes no weight, not the
critic's either, and the step's result says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import TypeAlias

import torch
from torch import Tensor, nn

from consumers.trainer.algorithms.losses import LossOutput
from consumers.trainer.algorithms.objective import Objective
from consumers.trainer.data.collate import MicroBatch
from consumers.trainer.data.plan import StepBatch
from consumers.trainer.metrics.expert_load import ExpertLoad
from consumers.trainer.metrics.step_metrics import StepMeter, sample_metrics
from consumers.trainer.metrics.timing import StepTimer
from consumers.trainer.model.policy import Policy, TokenScores
from consumers.trainer.model.router_replay import RouterReplay
from consumers.trainer.step.critic import CriticStep
from consumers.trainer.step.gradient_update import GradientUpdate, Update
from consumers.trainer.step.learner import Learner, StepResult
from consumers.trainer.step.prepare import Preparation

Observer: TypeAlias = ExpertLoad | RouterReplay
"""A watcher of forward passes with metrics of its own."""


@dataclass(eq=False)
class TrainStep(Learner):
    """An optimizer step, from micro-batches to changed weights and metrics; ``build_train_step`` puts it together::

        step = build_train_step(config)
        batch = step.planner.plan(groups).batch()
        result = step.run(batch, version=7)      # the policy is version 8 now

    preparation: None if the configuration asks for none. epochs: how often a step trains its batch.
    """

    objective: Objective
    preparation: Preparation | None = None
    critic: CriticStep | None = None
    observers: Sequence[Observer] = ()
    epochs: int = 1

    def parts(self) -> dict[str, tuple[nn.Module, GradientUpdate]]:
        return super().parts() | ({} if self.critic is None else self.critic.parts())

    def frozen(self) -> Sequence[nn.Module]:
        reference = None if self.preparation is None else self.preparation.reference
        return () if reference is None else (reference,)

    def run(self, batch: StepBatch, version: int) -> StepResult:
        """Update the weights for each minibatch of each epoch; ``version`` is that of the weights before the step."""
        timer = StepTimer()
        with timer.phase("prepare"):
            micro_batches: Sequence[MicroBatch] = [laid_out(micro, self.policy) for micro in batch.micro_batches]
            if self.preparation is not None:
                micro_batches = self.preparation.run_on_host(micro_batches)
            micro_batches = [micro.to(self.policy.device) for micro in micro_batches]
            if self.preparation is not None:
                micro_batches = self.preparation.run(self.policy, micro_batches, version, self.ranks.all_reduce_sum)
        lr = self.schedule.at(self.schedule.done + 1)
        ends = list(accumulate(batch.updates)) or [len(micro_batches)]
        minibatches = [micro_batches[start:end] for start, end in pairwise([0, *ends])]
        updates = [self._update(minibatch, version, lr, timer) for _ in range(self.epochs) for minibatch in minibatches]
        meter = StepMeter.combine([update.sums for update, _ in updates], self.epochs)
        skipped = [update.skipped for update, _ in updates]
        # A skipped step counts: the schedule follows the steps of the run.
        self.schedule.done += 1
        metrics = {
            **(sample_metrics(batch.plan) if batch.plan else {}),
            **meter.result(),
            **dict(chain(*(each.result(self.ranks.sum_over_ranks).items() for each in self.observers))),
            **_means([critic_metrics for _, critic_metrics in updates]),
            "grad_norm": sum(update.norm for update, _ in updates) / len(updates),
            "lr": lr,
            "skipped": sum(skipped) / len(skipped),
            **self.update.metrics(),
        }
        if "forward_flops" in metrics:
            metrics["forward_flops"] *= self.epochs
        of_samples = self.preparation is None or self.preparation.token_advantage is None
        advantages = batch.plan.credit.samples.tolist() if batch.plan and of_samples else ()
        ages = dict(sorted(meter.staleness.items()))
        return StepResult(metrics, ages, all(skipped), timer.lap(), advantages, meter.samples)

    def _update(
        self, minibatch: Sequence[MicroBatch], version: int, lr: float, timer: StepTimer
    ) -> tuple[Update[StepMeter], dict[str, float]]:
        """Update policy and critic once; returns the policy's update and the critic's metrics."""
        with timer.phase("optimizer"):
            update = self.update.run(lambda: self._accumulate(minibatch, version, timer), lr)
        with timer.phase("critic"):
            if update.skipped or self.critic is None:
                return update, {}
            self.critic.schedule.steps = self.schedule.steps
            return update, self.critic.run(minibatch, self.schedule.done)

    def _accumulate(self, batch: Sequence[MicroBatch], version: int, timer: StepTimer) -> StepMeter:
        """Run all forward and backward passes, then count metrics, which wait for the device; return this rank's."""
        meter = StepMeter(version)
        seen: list[tuple[MicroBatch, TokenScores, LossOutput, Tensor]] = []
        for micro in batch:
            with timer.phase("forward"):
                scores, output, loss = self._forward(micro, version)
            with timer.phase("backward"):
                self.update.backward(loss)
            scores = TokenScores(scores.logprobs.detach(), scores.entropy.detach())
            seen.append((micro, scores, LossOutput(output.loss.detach(), output.metrics), loss.detach()))
            del scores, output, loss
        for each in seen:
            meter.add(*each)
        return meter

    def _forward(self, micro: MicroBatch, version: int) -> tuple[TokenScores, LossOutput, Tensor]:
        """Compute this micro-batch's part of the step's loss, with its gradient graph, and what it is made of."""
        scores = self.policy(**micro.inputs(), entropy_gradient=self.objective.entropy_coef != 0.0)
        output = self.objective(micro.loss_inputs(scores.logprobs), scores.entropy, version)
        loss = output.loss * micro.weights
        if output.teacher is not None:
            loss = loss + output.teacher
        if micro.supervised_weights is not None:
            loss = loss - micro.supervised_weights * scores.logprobs
        return scores, output, torch.where(micro.mask, loss, 0.0).sum()


def laid_out(micro: MicroBatch, policy: Policy) -> MicroBatch:
    """Return a micro-batch on the host with the places of its tokens, as the policy computes them."""
    if micro.layout is not None:
        return micro
    layout = policy.lay_out(micro.tokens, micro.mask, micro.lengths, micro.temperatures, micro.routed_experts)
    images = micro.images
    if images is not None and policy.vision is not None:
        images = policy.vision.lay_out(policy.causal_lm.base_model, images)
    return replace(micro, layout=layout, images=images)


def _means(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    found = {name: [metrics[name] for metrics in updates if name in metrics] for each in updates for name in each}
    return {name: sum(values) / len(values) for name, values in found.items()}
