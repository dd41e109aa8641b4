"""One optimizer step: micro-batches in, one weight update and its metrics out.

The step knows neither the broker nor which algorithm it runs. Gradients are sums of weighted token
losses, so they don't depend on how the batch was cut. A step whose loss or gradient is not finite
changes no weight and says so.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from consumers.trainer.advantages import ADVANTAGES
from consumers.trainer.aggregation import AGGREGATIONS
from consumers.trainer.batches import Group, MicroBatch, StepBatch, assemble, count, empty_like
from consumers.trainer.losses import LOSSES, Loss, LossInputs
from consumers.trainer.metrics import StepMeter, sample_metrics
from consumers.trainer.optimizer import Schedule, build_optimizer
from consumers.trainer.policy import Policy
from consumers.trainer.ranks import Ranks
from schemas.config.models import TidemillConfig, TrainerConfig
from schemas.errors import ConfigError


@dataclass(frozen=True)
class StepResult:
    """metrics: flat, for logs. staleness: loss tokens by age in versions. skipped: no weight was changed.

    A skipped step is a step all the same: it makes a version of its own, with the weights of the one before.
    """

    metrics: dict[str, float]
    staleness: dict[int, int]
    skipped: bool


def bind(kind: str, function: Any, args: dict[str, Any]) -> Any:
    """``function`` with keyword arguments from the configuration; ConfigError if it doesn't take them."""
    try:
        inspect.signature(function).bind_partial(**args)
    except TypeError as error:
        raise ConfigError(f"{kind}.args {args}: {error}") from error
    return functools.partial(function, **args)


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
        base: Path | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """temperature and max_tokens are those of sampling; base is where users' own files are looked up."""
        self.ranks = ranks or Ranks()
        self.policy = self.ranks.prepare(policy)
        self.settings = settings
        self.temperature = temperature
        self.max_tokens = max_tokens
        advantage, loss = settings.advantage, settings.loss
        self._advantage = bind("trainer.advantage", ADVANTAGES.get(advantage.name, base), advantage.args)
        self._loss: Loss = bind("trainer.loss", LOSSES.get(loss.name, base), loss.args)
        self._aggregation = AGGREGATIONS.get(settings.aggregation, base)
        self.optimizer = build_optimizer(self.policy.parameters(), settings.optimizer)
        self.schedule = Schedule(self.optimizer, settings.optimizer, settings.steps)

    @classmethod
    def from_config(cls, policy: Policy, config: TidemillConfig, ranks: Ranks | None = None) -> TrainStep:
        """The step that a run's configuration describes."""
        return cls(
            policy,
            config.trainer,
            temperature=config.sampling.temperature,
            max_tokens=config.sampling.max_tokens,
            base=config.base,
            ranks=ranks,
        )

    def assemble(self, groups: Sequence[Group]) -> StepBatch:
        """Micro-batches of this rank's groups, normalised over the groups of all ranks."""
        return assemble(
            groups,
            advantage=self._advantage,
            aggregation=self._aggregation,
            micro_batch_tokens=self.settings.micro_batch_tokens,
            max_tokens=self.max_tokens,
            totals=self.ranks.totals(count(groups, self.max_tokens)),
        )

    def run(self, batch: StepBatch, version: int) -> StepResult:
        """Update the weights once; ``version`` is that of the weights before the step."""
        started = time.perf_counter()
        meter = StepMeter(version)
        times = {"forward": 0.0, "backward": 0.0}
        self.optimizer.zero_grad(set_to_none=True)
        for micro in self._micro_batches(batch):
            self._accumulate(micro.to(self.policy.device), meter, times)
        meter.reduce(self.ranks.add, self.ranks.most)

        before_update = time.perf_counter()
        norm = self.ranks.clip_grad_norm(self.policy.parameters(), self.settings.optimizer.max_grad_norm)
        lr = self.schedule.apply()
        skipped = not (norm < float("inf") and abs(meter.sums["loss"]) < float("inf"))
        if not skipped:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        # The schedule follows the run's steps, of which a skipped one is one too.
        self.schedule.advance()
        ended = time.perf_counter()
        metrics = {
            **sample_metrics(batch),
            **meter.result(),
            "grad_norm": norm,
            "lr": lr,
            "skipped": float(skipped),
            "time_forward_s": times["forward"],
            "time_backward_s": times["backward"],
            "time_optimizer_s": ended - before_update,
            "time_step_s": ended - started,
        }
        return StepResult(metrics, dict(sorted(meter.staleness.items())), skipped)

    def _micro_batches(self, batch: StepBatch) -> list[MicroBatch]:
        """Every rank runs as many, or the collectives of a sharded model would not meet."""
        micro_batches = list(batch.micro_batches)
        wanted = int(self.ranks.most([float(len(micro_batches))])[0])
        missing = wanted - len(micro_batches)
        return micro_batches + [empty_like(micro_batches[-1] if micro_batches else None)] * missing

    def _accumulate(self, micro: MicroBatch, meter: StepMeter, times: dict[str, float]) -> None:
        started = time.perf_counter()
        bonus = self.settings.loss.entropy_coef
        scores = self.policy(
            micro.tokens, micro.targets, micro.mask, temperature=self.temperature, entropy_gradient=bonus != 0.0
        )
        output = self._loss(
            LossInputs(
                logprobs=scores.logprobs,
                rollout_logprobs=micro.rollout_logprobs,
                advantages=micro.advantages,
                mask=micro.mask,
                versions=micro.versions,
            )
        )
        token_loss = output.loss - bonus * scores.entropy if bonus else output.loss
        loss = torch.where(micro.mask, token_loss * micro.weights, 0.0).sum()
        meter.add(micro, scores, output, loss)
        middle = time.perf_counter()
        self.ranks.backward(loss)
        times["forward"] += middle - started
        times["backward"] += time.perf_counter() - middle
