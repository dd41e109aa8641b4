"""One optimizer step: micro-batches in, one weight update and its metrics out.

The step knows neither the broker nor which algorithm it runs. Gradients are sums of weighted token
losses, so they don't depend on how the batch was cut. A step whose loss or gradient is not finite
changes no weight and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from consumers.trainer.algorithms.advantages import ADVANTAGES, raw
from consumers.trainer.algorithms.aggregation import AGGREGATIONS
from consumers.trainer.algorithms.objective import Objective
from consumers.trainer.data.microbatches import Group, StepBatch, StepPlan, TrainSample, collate, plan
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.metrics.step_metrics import StepMeter, sample_metrics
from consumers.trainer.metrics.timing import StepTimer
from consumers.trainer.model.compile import compile_layers
from consumers.trainer.model.policy import Policy, load_model
from consumers.trainer.step.critic import Critic, CriticStep
from consumers.trainer.step.optimizer import Schedule, build_optimizer
from consumers.trainer.step.prepare import Preparation, Prepared
from schemas.config import TidemillConfig, TrainerConfig
from schemas.plugins import bind, loss_attribute


@dataclass(frozen=True)
class StepResult:
    """metrics: flat, for logs. staleness: loss tokens by age in versions. skipped: no weight was changed.

    seconds: of each phase, ``total`` and what is in none of them, ``other``.

    A skipped step is a step all the same: it makes a version of its own, with the weights of the one before.
    """

    metrics: dict[str, float]
    staleness: dict[int, int]
    skipped: bool
    seconds: dict[str, float]


class TrainStep:
    """The optimizer's side of training::

    step = TrainStep.from_config(policy, config)
    batch = step.assemble(groups)
    result = step.run(batch, version=7)      # the policy is version 8 now
    """

    def __init__(
        self,
        policy: Policy,
        settings: TrainerConfig,
        *,
        temperature: float,
        max_tokens: int,
        dtype: str = "float32",
        base: Path | None = None,
        ranks: Ranks | None = None,
        reference: Policy | None = None,
        critic: Critic | None = None,
    ) -> None:
        """temperature and max_tokens are those of sampling; base is where users' own files are looked up.

        dtype: of computing. Parameters and optimizer keep the type of ``policy``, which is float32 in a run.
        reference: the policy that ``trainer.kl`` compares with, on the device where it stays. critic: of
        ``trainer.critic``.
        """
        self.ranks = ranks or Ranks()
        # Asked before the policy is sharded: afterwards parameters are parts.
        self._cost = policy.cost
        if settings.activation_checkpointing:
            policy.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
        if settings.compile:
            compile_layers(policy, self.ranks.accelerator.device.type)
        self.policy = self.ranks.prepare(policy, dtype)
        self.settings = settings
        self.temperature = temperature
        self.max_tokens = max_tokens
        function = ADVANTAGES.get(settings.advantage.name, base)
        advantage = bind("trainer.advantage", function, settings.advantage.args)
        by_token = loss_attribute(function, "per_token", False)
        self._advantage = raw if by_token else advantage
        self._objective = Objective.from_config(settings, base)
        self.critic = None
        if critic is not None and settings.critic is not None:
            self.critic = CriticStep(critic, settings.critic, settings.steps, self.ranks, dtype)
        self._preparation = Preparation(
            self._objective,
            temperature,
            reference=reference,
            lora_off=settings.lora_off,
            kl_in_reward=settings.kl.coef if settings.kl.place == "reward" else 0.0,
            token_advantage=advantage if by_token else None,
            critic=self.critic,
        )
        self._aggregation = AGGREGATIONS.get(settings.aggregation, base)
        self.optimizer = build_optimizer(self.policy.parameters(), settings.optimizer)
        self.schedule = Schedule(self.optimizer, settings.optimizer, settings.steps)

    @classmethod
    def from_config(cls, policy: Policy, config: TidemillConfig, ranks: Ranks | None = None) -> TrainStep:
        """The step that a run's configuration describes."""
        ranks = ranks or Ranks()
        return cls(
            policy,
            config.trainer,
            temperature=config.sampling.temperature,
            max_tokens=config.sampling.max_tokens,
            dtype=config.model.dtype,
            base=config.base,
            ranks=ranks,
            reference=reference_policy(config, ranks),
            critic=critic_of(config),
        )

    def assemble(self, groups: Sequence[Group]) -> StepBatch:
        """Plan the step over all ranks; the micro-batches are those of this one."""
        whole = plan(
            groups,
            advantage=self._advantage,
            aggregation=self._aggregation,
            micro_batch_tokens=self.settings.micro_batch_tokens,
            max_tokens=self.max_tokens,
            world=self.ranks.world,
            cost=self._cost,
            packed=self.policy.packed,
        )
        return self.batch(whole.share(self.ranks.rank), whole)

    def batch(self, micro_batches: Sequence[Sequence[TrainSample]], plan: StepPlan | None = None) -> StepBatch:
        """What this rank trains of a step that is planned; ``plan`` is all of it, where it is known."""
        return StepBatch([collate(samples) for samples in micro_batches], plan)

    def run(self, batch: StepBatch, version: int) -> StepResult:
        """Update the weights once; ``version`` is that of the weights before the step."""
        clock = StepTimer()
        meter = StepMeter(version)
        self.optimizer.zero_grad(set_to_none=True)
        with clock.phase("prepare"):
            micro_batches = [micro.to(self.policy.device) for micro in batch.micro_batches]
            prepared = self._preparation.run(self.policy, micro_batches, version, self.ranks.add)
        for part in prepared:
            with clock.phase("forward"):
                loss = self._forward(part, meter)
            with clock.phase("backward"):
                self.ranks.backward(loss)
        with clock.phase("optimizer"):
            meter.reduce(self.ranks.add, self.ranks.most)
            norm, lr, skipped = self._update(meter)
        with clock.phase("critic"):
            judged = self._train_critic(prepared, meter.sums["tokens"])
        # The schedule follows the run's steps, of which a skipped one is one too.
        self.schedule.advance()
        metrics = {
            **(sample_metrics(batch.plan) if batch.plan else {}),
            **meter.result(),
            **judged,
            "grad_norm": norm,
            "lr": lr,
            "skipped": float(skipped),
        }
        return StepResult(metrics, dict(sorted(meter.staleness.items())), skipped, clock.lap())

    def _update(self, meter: StepMeter) -> tuple[float, float, bool]:
        """Change the weights; the gradient's norm before it was clipped, the learning rate, whether it was skipped."""
        norm = self.ranks.clip_grad_norm(self.policy.parameters(), self.settings.optimizer.max_grad_norm)
        lr = self.schedule.apply()
        skipped = not (norm < float("inf") and abs(meter.sums["loss"]) < float("inf"))
        if not skipped:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm, lr, skipped

    def _forward(self, part: Prepared, meter: StepMeter) -> Tensor:
        """This micro-batch's part of the step's loss."""
        micro = part.micro
        bonus = self.settings.loss.entropy_coef
        scores = self.policy(
            micro.tokens,
            micro.targets,
            micro.mask,
            micro.lengths,
            temperature=self.temperature,
            entropy_gradient=bonus != 0.0,
        )
        output = self._objective(part.inputs(scores.logprobs), scores.entropy, meter.version)
        loss = torch.where(micro.mask, output.loss * micro.weights, 0.0).sum()
        meter.add(micro, scores, output, loss)
        return loss

    def _train_critic(self, prepared: Sequence[Prepared], tokens: float) -> dict[str, float]:
        """Train the critic on the step's returns, if there is one; its metrics."""
        if self.critic is None:
            return {}
        for part in prepared:
            if part.values is not None and part.returns is not None:
                self.critic.accumulate(part.micro, part.values, part.returns, tokens)
        return self.critic.update(self.schedule.done)


def critic_of(config: TidemillConfig) -> Critic | None:
    """The critic of ``trainer.critic`` before its first step; None without one."""
    settings, model = config.trainer.critic, config.model
    if settings is None:
        return None
    return Critic(load_model(settings.model or model.path, "float32", model.trust_remote_code))


def reference_policy(config: TidemillConfig, ranks: Ranks) -> Policy | None:
    """A second model that ``trainer.kl`` compares with, frozen; None where none is needed.

    Beside the policy it is sharded over the ranks like that; in main memory every rank has a whole one.
    """
    settings, model = config.trainer.kl, config.model
    if not settings.coef or config.trainer.lora_off:
        return None
    policy = Policy(load_model(settings.model or model.path, model.dtype, model.trust_remote_code))
    policy.requires_grad_(False)
    if settings.device == "cpu":
        return policy
    return ranks.prepare(policy, model.dtype) if ranks.world > 1 else policy.to(ranks.accelerator.device)
