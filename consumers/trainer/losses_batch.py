"""Losses that look further than one token: at the whole sequence (gspo), or at the whole step (m2po)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from consumers.trainer.losses import LossInputs, LossOutput, bounded_difference, clipped_surrogate, log_ratio
from consumers.trainer.segments import Segments
from schemas.errors import ConfigError

_HALVINGS = 64


def gspo(inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossOutput:
    """max(-A*s, -A*clip(s, 1-clip_low, 1+clip_high)), s = exp(mean of log r of the sequence) (GSPO, arXiv:2507.18071).

    Every token of a sequence holds the sequence's loss, so the aggregation ``sequence_mean`` gives the paper's
    objective. The defaults are the paper's, made for long answers and fresh data: s of a short or stale
    sequence leaves them at once.
    """
    segments = Segments(inputs.sequence, inputs.mask)
    mean_log_ratio = segments.mean(log_ratio(inputs))
    loss, clipped = clipped_surrogate(mean_log_ratio.exp(), inputs.advantages, clip_low, clip_high, None)
    return LossOutput(loss, {"clipped": clipped})


class M2po:
    """PPO without the tokens of largest (log rollout - log proximal)^2: so many that the others' mean is below 0.04.

    The mean is over the whole optimizer step, all micro-batches and ranks (M2PO, arXiv:2510.01161). The proximal
    policy is that of the step's start. What is left is clipped as in ``ppo``.
    """

    needs_proximal = True
    recomputes = True
    """What it measures is how far the policy has really moved, whatever ``trainer.loss.proximal`` says."""

    def __init__(
        self,
        *,
        second_moment: float = 0.04,
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        dual_clip: float | None = 3.0,
    ) -> None:
        if not second_moment > 0:
            raise ConfigError(f"m2po: second_moment {second_moment} must be above 0")
        self.second_moment = second_moment
        self.clip = (clip_low, clip_high, dual_clip)

    def select(self, batch: Sequence[LossInputs], add: Callable[[list[float]], list[float]]) -> list[Tensor]:
        """The tokens to keep in each micro-batch, bool [R, T]. ``add`` sums a list of numbers over ranks."""
        moments = [_squares(inputs) for inputs in batch]
        kept = [moment[inputs.mask] for moment, inputs in zip(moments, batch, strict=True)]
        limit = largest_kept(torch.cat(kept) if kept else torch.zeros(0), self.second_moment, add)
        return [inputs.mask & (moment.double() <= limit) for moment, inputs in zip(moments, batch, strict=True)]

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """The loss of one micro-batch, zero at the tokens that ``select`` left out."""
        if inputs.keep is None:
            raise ConfigError("m2po has to see the whole step before, and its select was not called")
        loss, clipped = clipped_surrogate(log_ratio(inputs).exp(), inputs.advantages, *self.clip)
        left_out = inputs.mask & ~inputs.keep
        return LossOutput(torch.where(inputs.keep, loss, 0.0), {"clipped": clipped & inputs.keep, "masked": left_out})


def largest_kept(values: Tensor, limit: float, add: Callable[[list[float]], list[float]]) -> float:
    """The highest bound under which the mean of the values that are not above it is below ``limit``.

    values: [M] of this rank, 0 or more. Found by halving, so that ranks only ever exchange a sum and a count;
    equal values stay or go together.
    """
    ordered = values.detach().double().sort().values.cpu()
    sums = torch.cat([ordered.new_zeros(1), ordered.cumsum(0)])

    def acceptable(bound: float) -> bool:
        count = int(torch.searchsorted(ordered, bound, right=True))
        total, tokens = add([float(sums[count]), float(count)])
        return tokens == 0 or total / tokens < limit

    low, high = 0.0, 4.0 * 20.0**2
    if acceptable(high):
        return high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if acceptable(middle) else (low, middle)
    return low


def _squares(inputs: LossInputs) -> Tensor:
    """(log rollout - log proximal)^2, [R, T], zero at masked positions."""
    if inputs.proximal_logprobs is None:
        raise ConfigError("m2po needs proximal log-probabilities, and the caller gave none")
    return bounded_difference(inputs.proximal_logprobs, inputs.rollout_logprobs, inputs.mask).detach().square()
