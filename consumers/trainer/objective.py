"""From scores to the loss of every token: the policy loss with its rejection rules, KL penalty and entropy bonus.

Pure: the step knows nothing of what is in it, and what is in it knows nothing of averaging or of models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from consumers.trainer.kl import KL_ESTIMATORS, Estimator, difference, kl_loss
from consumers.trainer.losses import LOSSES, Loss, LossInputs, LossOutput, bounded_difference
from consumers.trainer.losses_proximal import interpolated
from consumers.trainer.plugins import bind, trait
from consumers.trainer.rejection import Rule, reject
from consumers.trainer.segments import Segments
from schemas.config.models import TrainerConfig


@dataclass(frozen=True)
class Objective:
    """What is minimised, as the configuration says::

    objective = Objective.from_config(settings)
    output = objective(inputs, entropy, version=7)
    """

    loss: Loss
    rules: tuple[Rule, ...]
    kl_coef: float
    estimator: Estimator
    entropy_coef: float
    interpolate: bool

    @classmethod
    def from_config(cls, settings: TrainerConfig, base: Path | None = None) -> Objective:
        """ConfigError if something that is named does not exist, or does not take its arguments."""
        loss, kl = settings.loss, settings.kl
        return cls(
            loss=bind("trainer.loss", LOSSES.get(loss.name, base), loss.args),
            rules=tuple(Rule.of(rule, base) for rule in settings.rejection),
            kl_coef=kl.coef if kl.place == "loss" else 0.0,
            estimator=KL_ESTIMATORS.get(kl.estimator, base),
            entropy_coef=loss.entropy_coef,
            interpolate=loss.proximal == "interpolate",
        )

    @property
    def select(self) -> Any:
        """The loss's own choice among the tokens of the whole step, None if it makes none."""
        return trait(self.loss, "select", None)

    def with_proximal(self, inputs: LossInputs, version: int) -> LossInputs:
        """The inputs with proximal log-probabilities, if the loss uses them and they are not there yet.

        A step makes one update, so the weights it starts with are those of its own forward pass.
        """
        if inputs.proximal_logprobs is not None or not trait(self.loss, "needs_proximal", False):
            return inputs
        proximal = inputs.logprobs.detach()
        interpolate = self.interpolate and not trait(self.loss, "recomputes", False)
        if interpolate and inputs.versions is not None:
            proximal = interpolated(inputs.logprobs, inputs.rollout_logprobs, inputs.versions, version)
        return replace(inputs, proximal_logprobs=proximal)

    def __call__(self, inputs: LossInputs, entropy: Tensor, version: int) -> LossOutput:
        """Loss [R, T] of every token; entropy float32 [R, T]; version: that of the weights before the step."""
        output = self.loss(self.with_proximal(inputs, version))
        loss, metrics = output.loss, dict(output.metrics)
        if self.rules:
            segments = Segments(inputs.sequence, inputs.mask)
            mismatch = bounded_difference(inputs.logprobs, inputs.rollout_logprobs, inputs.mask).detach()
            factor, rejected = reject(self.rules, mismatch, segments)
            # A rejected token may hold an infinite loss, which a factor of zero would turn into NaN.
            loss = torch.where(rejected, 0.0, loss * factor)
            metrics["rejected"] = rejected
        if inputs.reference_logprobs is not None:
            gap = difference(inputs.logprobs.detach(), inputs.reference_logprobs, inputs.mask)
            metrics["reference_kl"] = self.estimator(gap)
        if self.kl_coef and inputs.reference_logprobs is not None:
            loss = loss + self.kl_coef * kl_loss(
                self.estimator, inputs.logprobs, inputs.reference_logprobs, inputs.rollout_logprobs, inputs.mask
            )
        if self.entropy_coef:
            loss = loss - self.entropy_coef * entropy
        return LossOutput(loss, metrics)
