"""Estimators of KL(policy || reference) from sampled tokens, as a penalty in the loss or in the reward.

With d = log policy - log reference at a sampled token (http://joschu.net/blog/kl-approx.html):
k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d. These are about tokens of the policy itself, and ours are the rollout
policy's: in the loss they are weighed by policy / rollout policy, in the reward the policy loss does that.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from consumers.trainer.algorithms.losses import bounded_difference

Estimator: TypeAlias = Callable[[Tensor], Tensor]


def k1(difference: Tensor) -> Tensor:
    """log policy - log reference: unbiased, of high variance, negative at times."""
    return difference


def k2(difference: Tensor) -> Tensor:
    """Half the square of log policy - log reference: biased, never negative."""
    return 0.5 * difference.square()


def k3(difference: Tensor) -> Tensor:
    """reference / policy - 1 - log(reference / policy): unbiased and never negative (as in GRPO, arXiv:2402.03300)."""
    return torch.expm1(-difference) + difference


def kl_loss(
    estimator: Estimator,
    logprobs: Tensor,
    reference_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    weight_limit: float = 2.0,
    bias_correction: bool = True,
) -> Tensor:
    """w * estimate of each token, [R, T], with the gradient w * d * grad log policy; w = sg[min(r, weight_limit)].

    The gradient is the same for every estimator, that of KL(policy || reference) itself: for tokens of the
    policy E[d * grad log policy] is exactly it, and r * k3 has this very gradient. An estimator's own
    derivative is something else: for k1 it is zero on average, for k3 that of KL(reference || policy). Without
    ``bias_correction`` it is the estimate with this derivative, as in TRL and verl.
    """
    if not bias_correction:
        return estimator(bounded_difference(logprobs, reference_logprobs, mask))
    gap = bounded_difference(logprobs.detach(), reference_logprobs, mask)
    weight = bounded_difference(logprobs.detach(), rollout_logprobs, mask).exp().clamp(max=weight_limit)
    carrier = torch.where(mask, logprobs - logprobs.detach(), 0.0)  # zero, with the gradient of log policy
    return weight * (estimator(gap) + gap * carrier)


def kl_reward(estimator: Estimator, logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The estimate at each token, [R, T], without gradient, zero at masked positions: what a reward is reduced by."""
    return estimator(bounded_difference(logprobs, reference_logprobs, mask)).detach()
