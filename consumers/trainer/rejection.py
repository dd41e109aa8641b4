"""What is done with tokens on which trainer and rollout policy disagree too much: pure rules over their log ratio.

A rule has a measure (the ratio, or an estimate of KL), a level (token, or mean over the sequence) and
an action (mask: no gradient; clamp: the ratio counts as the bound). The step's denominators still count what a
rule takes out: that is one of the two conventions, and dividing by the kept tokens gives another loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from consumers.trainer.kl import KL_ESTIMATORS, Estimator
from consumers.trainer.segments import Segments
from schemas.config.models import RejectionConfig


@dataclass(frozen=True)
class Rule:
    """A ``trainer.rejection`` entry with its measure looked up; ``estimator`` is None for the ratio."""

    settings: RejectionConfig
    estimator: Estimator | None

    @classmethod
    def of(cls, settings: RejectionConfig, base: Path | None = None) -> Rule:
        """ConfigError if there is no such measure."""
        known = settings.measure == "ratio"
        return cls(settings, None if known else KL_ESTIMATORS.get(settings.measure, base))

    def factor(self, log_ratio: Tensor, segments: Segments) -> Tensor:
        """What each token's loss is multiplied by, [R, T], 1 where the rule has no objection.

        log_ratio: log(policy / rollout policy) [R, T] without gradient, zero at masked positions. At level sequence
        the ratio is exp of its mean over the sequence, KL the mean of the estimates.
        """
        settings = self.settings
        # KL(rollout || policy), since the tokens are the rollout policy's.
        measured = log_ratio if self.estimator is None else self.estimator(-log_ratio)
        if settings.level == "sequence":
            measured = segments.mean(measured)
        if self.estimator is None:
            measured = measured.exp()
        bounded = measured.clamp(settings.lower, settings.upper)
        if settings.action == "clamp":
            return bounded / measured
        return (bounded == measured).to(measured.dtype)


def reject(rules: Sequence[Rule], log_ratio: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Product of all rules' factors [R, T], and the tokens that one of them masks (bool [R, T])."""
    factor = torch.ones_like(log_ratio)
    for rule in rules:
        factor = factor * rule.factor(log_ratio, segments)
    return factor, (factor == 0) & segments.mask
