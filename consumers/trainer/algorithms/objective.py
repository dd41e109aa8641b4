"""The objective of a step: every token's loss, of policy loss, rejection rules, KL penalty and entropy bonus.

A rejection rule takes out tokens on which trainer and rollout policy disagree too much. It has a measure (the ratio, or
an estimate of KL), a level (token, or mean over the sequence) and an action (mask: no gradient; clamp: the ratio counts
as the bound). The step's denominators still count what a rule takes out: that is one of the two conventions, and
dividing by the kept tokens gives another loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from consumers.trainer.algorithms import ADVANTAGES, KL_ESTIMATORS
from consumers.trainer.algorithms.kl import Estimator, kl_loss
from consumers.trainer.algorithms.losses import (
    BoundLoss,
    LossFunction,
    LossInputs,
    LossOutput,
    bounded_difference,
    interpolated,
)
from consumers.trainer.algorithms.sequences import Sequences
from schemas.config import RejectionConfig, TidemillConfig, TrainerConfig
from schemas.config.algorithm import setting_of
from schemas.errors import ConfigError
from schemas.plugins import bind


@dataclass(frozen=True)
class Rule:
    """A ``trainer.rejection`` entry with its measure looked up; ``estimator`` is None for the ratio."""

    settings: RejectionConfig
    estimator: Estimator | None

    @classmethod
    def of(cls, settings: RejectionConfig, base: Path | None = None) -> Self:
        """Make the rule from its settings. ConfigError if the measure is neither ratio nor a KL estimator."""
        known = settings.measure == "ratio"
        return cls(settings, None if known else KL_ESTIMATORS.get(settings.measure, base))

    def factor(self, log_ratio: Tensor, sequences: Sequences) -> Tensor:
        """Factor of each token's loss, float32 [R, T], 1 where the rule has no objection.

        log_ratio: log(policy / rollout policy) [R, T] without gradient, zero at masked positions. At level sequence
        the ratio is exp of its mean over the sequence, KL the mean of the estimates.
        """
        settings = self.settings
        # KL(rollout || policy), since the tokens are the rollout policy's.
        measured = log_ratio if self.estimator is None else self.estimator(-log_ratio)
        if settings.level == "sequence":
            measured = sequences.mean(measured)
        if self.estimator is None:
            measured = measured.exp()
        bounded = measured.clamp(settings.lower, settings.upper)
        if settings.action == "clamp":
            return bounded / measured
        return (bounded == measured).to(measured.dtype)


def reject(rules: Sequence[Rule], log_ratio: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Product of all rules' factors, float32 [R, T], and the tokens that a rule masks, bool [R, T]."""
    factor = torch.ones_like(log_ratio)
    for rule in rules:
        factor = factor * rule.factor(log_ratio, sequences)
    return factor, (factor == 0) & sequences.mask


def load_advantages(config: TidemillConfig) -> dict[str, Any]:
    """Return all advantages with their arguments bound, by label; ConfigError if they can't be in one step."""
    found, several = dict[str, Any](), len(config.trainer.advantages) > 1
    for label, one in config.trainer.advantages.items():
        where = setting_of("advantage", label)
        found[label] = bind(where, ADVANTAGES.get(one.name, config.base), one.args)
        if several and getattr(found[label], "per_token", False):
            raise ConfigError(f"{where} {one.name!r} compares all tokens of the step: it must be that of all datasets")
    return found


@dataclass(frozen=True)
class Objective:
    """The function that training minimises. others: datasets' own losses, numbered from 1 by ``LossInputs.loss``."""

    loss: LossFunction
    rules: tuple[Rule, ...]
    kl_coef: float
    kl_corrected: bool
    estimator: Estimator
    entropy_coef: float
    interpolate: bool
    taught: bool = False
    others: tuple[LossFunction, ...] = ()

    @classmethod
    def from_config(cls, settings: TrainerConfig, base: Path | None = None) -> Self:
        """Build the objective; ConfigError if a name does not exist, or does not take its arguments."""
        kl, found = settings.kl, list[BoundLoss]()
        for label, own in settings.losses.items():
            where = setting_of("loss", label)
            found.append(BoundLoss.load(own.name, own.args, base, where))
            if label and (found[0].select_tokens or found[-1].select_tokens or found[-1].needs_proximal):
                raise ConfigError(f"{where} {own.name!r}: a loss with a proximal policy must be that of all datasets")
        return cls(
            loss=found[0],
            rules=tuple(Rule.of(rule, base) for rule in settings.rejection),
            kl_coef=kl.coef if kl.place == "loss" else 0.0,
            kl_corrected=kl.bias_correction,
            estimator=KL_ESTIMATORS.get(kl.estimator, base),
            entropy_coef=settings.loss.entropy_coef,
            interpolate=settings.loss.proximal == "interpolate",
            taught=kl.reference == "teacher",
            others=tuple(found[1:]),
        )

    def with_proximal(self, inputs: LossInputs, version: int) -> LossInputs:
        """The inputs with proximal log-probabilities, if the loss uses them and they are not there yet.

        In a step of one update, the weights it starts with are those of its own forward pass; see Preparation.
        """
        if inputs.proximal_logprobs is not None or not self.loss.needs_proximal:
            return inputs
        proximal = inputs.logprobs.detach()
        if self.interpolate and not self.loss.recomputes and inputs.versions is not None:
            proximal = interpolated(inputs.logprobs, inputs.rollout_logprobs, inputs.versions, version)
        return replace(inputs, proximal_logprobs=proximal)

    def __call__(self, inputs: LossInputs, entropy: Tensor, version: int) -> LossOutput:
        """Loss [R, T] of every token; entropy float32 [R, T]; version: that of the weights before the step."""
        output = self.loss(self.with_proximal(inputs, version))
        loss, metrics = output.loss, dict(output.metrics)
        for number, other in enumerate(self.others, 1):
            found, none = other(inputs), torch.zeros_like(inputs.mask)
            own = none if inputs.loss is None else inputs.loss == number
            loss = torch.where(own, found.loss, loss)
            for name in dict.fromkeys((*metrics, *found.metrics)):
                metrics[name] = torch.where(own, found.metrics.get(name, none), metrics.get(name, none))
        if self.rules:
            sequences = Sequences(inputs.sequence, inputs.mask)
            mismatch = bounded_difference(inputs.logprobs, inputs.rollout_logprobs, inputs.mask).detach()
            factor, rejected = reject(self.rules, mismatch, sequences)
            # A rejected token may hold an infinite loss, which a factor of zero would turn into NaN.
            loss = torch.where(rejected, 0.0, loss * factor)
            metrics["rejected"] = rejected
        reference, mask, teacher = inputs.reference_logprobs, inputs.mask, None
        if self.taught:
            # Ranks add up the same metrics, also one of which no row has a teacher.
            weights = torch.zeros_like(loss) if inputs.teacher_weights is None else inputs.teacher_weights
            mask = mask & (weights > 0)
            metrics["taught"] = mask
            reference = torch.zeros_like(loss) if reference is None else reference
        if reference is not None:
            metrics["reference_kl"] = self.estimator(bounded_difference(inputs.logprobs.detach(), reference, mask))
        if self.kl_coef and reference is not None:
            given = (inputs.logprobs, reference, inputs.rollout_logprobs, mask)
            penalty = self.kl_coef * kl_loss(self.estimator, *given, bias_correction=self.kl_corrected)
            loss, teacher = (loss, weights * penalty) if self.taught else (loss + penalty, None)
        if self.entropy_coef:
            loss = loss - self.entropy_coef * entropy
        return LossOutput(loss, metrics, teacher)
