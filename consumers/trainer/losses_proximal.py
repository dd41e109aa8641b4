"""The decoupled PPO loss, and where its proximal policy comes from.

The proximal policy is what the update is clipped around, while the rollout policy only weighs the data.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from consumers.trainer.losses import LossInputs, LossOutput, bounded_difference, clipped_surrogate, needs_proximal
from schemas.errors import ConfigError


def interpolated(logprobs: Tensor, rollout_logprobs: Tensor, versions: Tensor, version: int) -> Tensor:
    """Proximal log-probabilities between rollout policy and trained policy, without a forward pass.

    alpha * log rollout + (1 - alpha) * sg[log policy], alpha = 1/age for tokens of age 1 or more, 0 for the
    newest (A-3PO, arXiv:2512.06547): at age 1 that is the rollout policy, far back it is nearly the policy of now.
    versions: int64 [R, T]; version: that of the weights before the step.
    """
    age = version - versions
    alpha = torch.where(age >= 1, 1.0 / age.clamp(min=1), 0.0).to(logprobs.dtype)
    return alpha * rollout_logprobs + (1 - alpha) * logprobs.detach()


@needs_proximal
def decoupled_ppo(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 3.0,
    weight_limit: float = 5.0,
    weight_action: Literal["mask", "clamp"] = "mask",
) -> LossOutput:
    """w * ppo(r), r = policy / proximal policy, w = sg[proximal policy / rollout policy] (AReaL, arXiv:2505.24298).

    A token with w over ``weight_limit`` is left out (``mask``), or gets the limit as its weight (``clamp``).
    """
    if inputs.proximal_logprobs is None:
        raise ConfigError("decoupled_ppo needs proximal log-probabilities, and the caller gave none")
    if weight_action not in ("mask", "clamp"):
        raise ConfigError(f"decoupled_ppo: weight_action {weight_action!r} must be mask or clamp")
    proximal = inputs.proximal_logprobs.detach()
    ratio = bounded_difference(inputs.logprobs, proximal, inputs.mask).exp()
    weight = bounded_difference(proximal, inputs.rollout_logprobs, inputs.mask).exp()
    over = weight > weight_limit
    weight = torch.where(over, 0.0 if weight_action == "mask" else weight_limit, weight)
    loss, clipped = clipped_surrogate(ratio, inputs.advantages, clip_low, clip_high, dual_clip)
    left_out = over if weight_action == "mask" else torch.zeros_like(over)
    return LossOutput(weight * loss, {"clipped": clipped & ~left_out, "masked": left_out, "weight": weight})
