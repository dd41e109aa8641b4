"""The step of SAC over fragments (arXiv:1812.05905): twin Q networks, a tuned temperature, and a replay buffer.

New transitions go into the buffer, then there are as many updates as trainer.sac says. The order within an update is
that of Stable-Baselines3. Everything random follows from run.seed and the step's number.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from consumers.trainer.data.plan import StepPlanner
from consumers.trainer.distributed.ranks import Ranks
from consumers.trainer.fragments.actor_critic import Actor, TwinCritic
from consumers.trainer.fragments.plan import FragmentPlan
from consumers.trainer.fragments.replay_buffer import ReplayBuffer
from consumers.trainer.fragments.transitions import discounted_returns, fragments_of, observed
from consumers.trainer.metrics.timing import StepTimer
from consumers.trainer.model.policy import Policy
from consumers.trainer.step.gradient_update import GradientUpdate, Schedule, Sums
from consumers.trainer.step.learner import Learner, StepResult
from consumers.trainer.step.optimizers import build_optimizer
from schemas.config import SacConfig, TidemillConfig
from schemas.messages import Trajectory
from schemas.policy_shape import PolicyShape

METRICS = ("alpha", "entropy", "critic_loss", "q_mean", "loss", "grad_norm", "critic_grad_norm", "skipped")


class Temperature(nn.Module):
    """The weight of the entropy, alpha, by its logarithm; at first 1."""

    def __init__(self) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.zeros(1))


@dataclass(eq=False)
class SacStep(Learner):
    """A step of SAC. critic, temperature: what is trained beside the policy, each with its update. seed: run.seed."""

    critic: tuple[TwinCritic, GradientUpdate]
    temperature: tuple[Temperature, GradientUpdate]
    buffer: ReplayBuffer
    settings: SacConfig
    seed: int

    def parts(self) -> dict[str, tuple[nn.Module, GradientUpdate]]:
        return {**super().parts(), "critic": self.critic, "temperature": self.temperature}

    def state(self) -> dict[str, Any]:
        return self.buffer.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.buffer.restore(state)

    def run(self, batch: Any, version: int) -> StepResult:
        timer, done, settings = StepTimer(), self.schedule.done, self.settings
        before = self.buffer.count
        with timer.phase("prepare"):
            new = self._take_in([sample for sample, _ in batch.samples])
        ratio = settings.updates_per_transition
        # Whole updates, whose number over all steps is exact.
        first, end = int(before * ratio), int(self.buffer.count * ratio)
        updates = end - first if self.buffer.count >= settings.start else 0
        rng = np.random.default_rng([self.seed, done])
        noise = torch.Generator().manual_seed((self.seed * 1_000_003 + done) % 2**63)
        lr = self.schedule.at(done + 1)
        with timer.phase("optimizer"):
            found = [
                self.update_once(
                    self.buffer.draw(rng, settings.batch), noise, lr, improve=number % settings.policy_every == 0
                )
                for number in range(first, first + updates)
            ]
        self.schedule.done += 1
        metrics = {
            name: float(np.mean(values))
            for name in METRICS
            if (values := [numbers[name] for numbers in found if name in numbers])
        }
        metrics |= {"tokens": float(new), "lr": lr, "updates": float(updates), "buffer": float(self.buffer.filled)}
        skipped = bool(updates) and metrics["skipped"] == 1.0
        return StepResult(metrics, batch.ages(version), skipped, timer.lap())

    def _take_in(self, samples: Sequence[Trajectory]) -> int:
        """Add the transitions of fragments to the buffer and to the moments; returns their number."""
        fragments, critic = fragments_of(samples), self.critic[0]
        for moments in (cast(Actor, self.policy).moments, critic.moments):
            if moments.size:
                moments.add(observed(fragments))
        if critic.returns.size:
            critic.returns.add(discounted_returns(fragments, self.settings.gamma))
        return self.buffer.add(samples)

    def update_once(
        self, data: dict[str, Tensor], noise: torch.Generator, lr: float, improve: bool = True
    ) -> dict[str, float]:
        """Update the critic, temperature and policy if ``improve``, and the targets; return the values of METRICS."""
        actor, (critic, critic_update) = cast(Actor, self.policy), self.critic
        data = {name: value.to(actor.device) for name, value in data.items()}
        module, temperature_update = self.temperature
        seen, gamma = data["observations"], self.settings.gamma
        alpha = module.log_alpha.detach().exp()
        actions, logprobs = actor.sample(seen, _normal(data["actions"], noise))
        with torch.no_grad():
            goal = self.settings.target_entropy
            gap = logprobs.detach() + (-float(actions.shape[-1]) if goal is None else goal)
            following, following_logprobs = actor.sample(data["next_observations"], _normal(data["actions"], noise))
        few = self.settings.critics == 2
        pair = torch.arange(2) if few else torch.randperm(self.settings.critics, generator=noise)[:2]

        def critic_loss() -> tuple[Tensor, Tensor]:
            found, values = critic.of_both_steps((seen, data["actions"]), (data["next_observations"], following))
            value = values[pair].amin(0) - alpha * following_logprobs
            wanted = critic.returns.scale(data["rewards"]) + gamma * (1 - data["terminated"]) * value
            return 0.5 * (found - wanted).square().mean(-1).sum(), found.mean()

        def policy_loss() -> Tensor:
            values = critic(seen, actions)
            loss: Tensor = (alpha * logprobs - (values.amin(0) if few else values.mean(0))).mean()
            return loss

        numbers, skipped = {"alpha": float(alpha), "entropy": -float(logprobs.detach().mean())}, False
        if improve:
            warmed = temperature_update.run(_once(temperature_update, lambda: -(module.log_alpha * gap).mean()), lr)
            skipped = warmed.skipped
        learnt = critic_update.run(_once(critic_update, critic_loss), lr)
        numbers |= dict(zip(("critic_loss", "q_mean"), learnt.sums.values, strict=True))
        numbers["critic_grad_norm"] = learnt.norm
        if improve:
            with _fixed(critic):
                improved = self.update.run(_once(self.update, policy_loss), lr)
            numbers |= {"loss": improved.sums.loss, "grad_norm": improved.norm}
            skipped = skipped or improved.skipped
        critic.follow(self.settings.tau)
        return {**numbers, "skipped": float(skipped or learnt.skipped)}


def _normal(like: Tensor, noise: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=noise).to(like.device)


def _once(update: GradientUpdate, loss: Callable[[], Tensor | tuple[Tensor, Tensor]]) -> Callable[[], Sums]:
    """Return the pass of an update over one batch; a second tensor of ``loss`` is a metric."""

    def accumulate() -> Sums:
        found = loss()
        values = found if isinstance(found, tuple) else (found,)
        update.backward(values[0])
        return Sums([float(value.detach()) for value in values])

    return accumulate


@contextmanager
def _fixed(module: nn.Module) -> Iterator[None]:
    """Compute no gradient of the module's weights in the block, only of what goes through it."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def build_sac_step(config: TidemillConfig, ranks: Ranks, settings: SacConfig) -> SacStep:
    """Build the step of SAC with new networks and an empty buffer; ConfigError for a policy that is not squashed."""
    trainer, shape = config.trainer, PolicyShape.read(config.model.path, sac=True)

    def part(module: nn.Module) -> GradientUpdate:
        optimizer = build_optimizer(module, trainer.optimizer)
        return GradientUpdate(module, optimizer, ranks, trainer.optimizer.max_grad_norm, torch.float32)

    shown = None if settings.demonstrations is None else Path(settings.demonstrations)
    device = ranks.accelerator.device
    actor, temperature = Actor(shape).to(device), Temperature().to(device)
    critic = TwinCritic(shape, settings.critics, settings.norm, trainer.scale_rewards).to(device)
    return SacStep(
        cast(Policy, actor),
        cast(StepPlanner, FragmentPlan()),
        part(actor),
        Schedule(trainer.optimizer, trainer.optimizer.lr, trainer.steps),
        ranks,
        (critic, part(critic)),
        (temperature, part(temperature)),
        ReplayBuffer(config.folder, settings.buffer, shape.size, sum(shape.counts), shown),
        settings,
        config.run.seed,
    )
