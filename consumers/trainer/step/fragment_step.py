"""The optimizer step over fragments: PPO in epochs of shuffled minibatches, with any loss of single tokens.

Everything random follows from run.seed and the step's number, so the same fragments give the same weights to the bit.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from consumers.trainer.algorithms import ADVANTAGES
from consumers.trainer.algorithms.advantages import Advantage, Gae, whiten
from consumers.trainer.algorithms.losses import LossInputs
from consumers.trainer.algorithms.objective import Objective
from consumers.trainer.data.plan import StepPlanner
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.fragments.actor_critic import Actor, ValueNetwork
from consumers.trainer.fragments.plan import FragmentPlan
from consumers.trainer.fragments.transitions import Transitions, discounted_returns, fragments_of
from consumers.trainer.metrics.timing import StepTimer
from consumers.trainer.model.policy import Policy
from consumers.trainer.step.critic import CriticStep, value_loss
from consumers.trainer.step.gradient_update import GradientUpdate, Schedule, Sums
from consumers.trainer.step.learner import Learner, StepResult
from consumers.trainer.step.optimizers import build_optimizer
from consumers.trainer.step.sac_step import build_sac_step
from schemas.config import TidemillConfig
from schemas.errors import ConfigError
from schemas.plugins import bind
from schemas.policy_shape import PolicyShape


class FragmentCritic(CriticStep):
    """The critic of a fragment step, with an optimizer of its own."""

    def train(self, part: Transitions, done: int) -> tuple[float, float]:
        """Update the critic on a minibatch; returns loss and gradient norm."""

        def accumulate() -> Sums:
            found = self.critic(part.observations)
            loss = value_loss(found, part.values, part.returns, self.settings.clip).mean()
            self.update.backward(loss)
            return Sums([float(loss.detach())])

        update = self.update.run(accumulate, self.schedule.at(done + 1))
        return update.sums.loss, update.norm


@dataclass(eq=False)
class PpoStep(Learner):
    """A step of PPO over fragments. minibatches: parts of an epoch. seed: run.seed.

    advantage: with a critic gamma, lam, and whether advantages are normalised in each minibatch; without one a function
    that compares the episodes of a group, of which every step has its episode's. normalise: over the whole step.
    """

    objective: Objective
    critic: FragmentCritic | None
    epochs: int
    advantage: Gae | Advantage
    minibatches: int
    seed: int
    normalise: bool = False

    def parts(self) -> dict[str, tuple[nn.Module, GradientUpdate]]:
        return super().parts() | ({} if self.critic is None else self.critic.parts())

    def run(self, batch: Any, version: int) -> StepResult:
        """Update actor and critic for each minibatch of each epoch; ``version`` is that before the step."""
        timer = StepTimer()
        actor, critic, done = self.policy, self.critic, self.schedule.done
        with timer.phase("prepare"), torch.no_grad():
            data = self._transitions(batch).to(actor.device)
            if self.normalise:
                everything = [torch.ones_like(data.advantages, dtype=torch.bool)]
                data = replace(data, advantages=whiten([data.advantages], everything, self.ranks.all_reduce_sum)[0])
            proximal = cast(Any, actor)(data.observations, data.actions)[0]
        lr, shuffle = self.schedule.at(done + 1), torch.Generator().manual_seed((self.seed * 1_000_003 + done) % 2**63)
        sums, norms, skipped, updates = [0.0] * 6, 0.0, 0, 0
        for _ in range(self.epochs):
            for chosen in torch.randperm(len(data), generator=shuffle).chunk(self.minibatches):
                part = data.take(chosen)
                with timer.phase("optimizer"):
                    update = self.update.run(lambda p=part, c=chosen: self._add_gradient(p, proximal[c], version), lr)  # type: ignore[misc]
                with timer.phase("critic"):
                    critic_loss = (0.0, 0.0) if update.skipped or critic is None else critic.train(part, done)
                values = [*update.sums.values, *critic_loss]
                sums = [total + value for total, value in zip(sums, values, strict=True)]
                norms, skipped, updates = norms + update.norm, skipped + update.skipped, updates + 1
        self.schedule.done += 1
        if skipped < updates:
            # Not before: the first update compares with a policy that normalised as this version does.
            for module, _ in self.parts().values():
                cast(Any, module).moments.add(data.observations)
        names = ("loss", "entropy", "clip_fraction", "kl", "critic_loss", "critic_grad_norm")
        metrics = {name: total / updates for name, total in zip(names, sums, strict=True)}
        metrics |= {"tokens": float(len(data)), "lr": lr, "grad_norm": norms / updates, "skipped": skipped / updates}
        spread = float(data.returns.var())
        if spread > 0:
            metrics["critic_explained_variance"] = 1.0 - float((data.returns - data.values).var()) / spread
        return StepResult(metrics, batch.ages(version), skipped == updates, timer.lap())

    def _transitions(self, batch: FragmentPlan) -> Transitions:
        samples = [sample for sample, _ in batch.samples]
        if self.critic is not None and isinstance(self.advantage, Gae):
            self.critic.schedule.steps = self.schedule.steps
            network = cast(ValueNetwork, self.critic.critic)
            if network.returns.size:
                network.returns.add(discounted_returns(fragments_of(samples), self.advantage.gamma))
            return Transitions.of(samples, network, self.advantage.gamma, self.advantage.lam)
        rewards = np.array([reward for _, reward in batch.samples], dtype=np.float64)
        found = cast(Advantage, self.advantage)(rewards, np.array(batch.groups, dtype=np.int64))
        return Transitions.of_episodes(samples, found)

    def _add_gradient(self, part: Transitions, proximal: torch.Tensor, version: int) -> Sums:
        """Run forward and backward for a minibatch; returns the means of its loss and metrics."""
        advantages = part.advantages
        if isinstance(self.advantage, Gae) and self.advantage.normalise and len(part) > 1:
            advantages = (advantages - advantages.mean()) / (advantages.std() + self.advantage.eps)
        logprobs, entropy = cast(Any, self.policy)(part.observations, part.actions)
        inputs = LossInputs(
            logprobs[None],
            part.rollout_logprobs[None],
            advantages[None],
            torch.ones_like(advantages, dtype=torch.bool)[None],
            versions=part.versions[None],
            proximal_logprobs=proximal[None] if self.objective.loss.needs_proximal else None,
        )
        output = self.objective(inputs, entropy[None], version)
        loss = output.loss.mean()
        self.update.backward(loss)
        clipped = output.metrics.get("clipped")
        ratio = (logprobs.detach() - part.rollout_logprobs).double()
        share = 0.0 if clipped is None else float(clipped.float().mean())
        kl = float((ratio.exp() - 1 - ratio).mean())
        return Sums([float(loss.detach()), float(entropy.detach().mean()), share, kl])


def build_fragment_step(config: TidemillConfig, ranks: Ranks) -> Learner:
    """Build the step of model.kind mlp, with new networks; ConfigError for more than one rank."""
    trainer = config.trainer
    if ranks.world > 1:
        raise ConfigError(f"model.kind mlp trains on one rank, not on {ranks.world}")
    if trainer.sac is not None:
        return build_sac_step(config, ranks, trainer.sac)
    shape, grouped = PolicyShape.read(config.model.path, sac=False), config.compares_episodes
    if trainer.critic is None and not grouped:
        raise ConfigError("model.kind mlp needs a trainer.critic or a trainer.sac section with the advantage gae")
    actor = Actor(shape).to(ranks.accelerator.device)
    critic = None
    if trainer.critic is not None:
        network: Any = ValueNetwork(shape, trainer.scale_rewards)
        critic = FragmentCritic(network, trainer.critic, trainer.steps, ranks)
    function = ADVANTAGES.get(trainer.advantage.name, config.base) if grouped else Gae
    optimizer = build_optimizer(actor, trainer.optimizer)
    return PpoStep(
        cast(Policy, actor),
        cast(StepPlanner, FragmentPlan()),
        GradientUpdate(actor, optimizer, ranks, trainer.optimizer.max_grad_norm, torch.float32),
        Schedule(trainer.optimizer, trainer.optimizer.lr, trainer.steps),
        ranks,
        Objective.from_config(trainer, config.base),
        critic,
        trainer.epochs,
        bind("trainer.advantage", function, trainer.advantage.args),
        trainer.minibatches,
        config.run.seed,
        trainer.advantage.normalise,
    )
