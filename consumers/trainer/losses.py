"""Policy losses: pure functions of one dataclass, from log-probabilities to a loss for every token.

A loss says nothing about averaging (see aggregation.py) and returns values at masked positions too:
the step weighs them by zero. ``log_ratio`` is clamped before exp, so one extreme token gives a large but
finite loss. Formulas: r = policy / rollout policy, A the advantage, sg stops the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from schemas.plugins import Registry

LOG_RATIO_LIMIT = 20.0
"""|log r| is clamped to this before exp: e^20 still squares within float32."""


@dataclass(frozen=True)
class LossInputs:
    """Everything a loss may look at; float32 [R, T], rows are sequences, unless said otherwise.

    logprobs: of the policy in training, with gradient. rollout_logprobs: of the policy that sampled.
    mask: bool, true at loss tokens. versions: int64, weight version of each token, -1 where there is none.
    proximal_logprobs, reference_logprobs: of further policies, when the run has them.
    """

    logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    versions: Tensor | None = None
    proximal_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None


@dataclass(frozen=True)
class LossOutput:
    """loss: [R, T] with gradient. metrics: [R, T] each, without; the step averages them over its loss tokens.

    ``clipped`` marks tokens whose gradient the clip took, ``masked`` those that the loss left out.
    """

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


Loss: TypeAlias = Callable[..., LossOutput]

LOSSES = Registry(
    "trainer.loss.name",
    {name: f"consumers.trainer.losses:{name}" for name in ("reinforce", "ppo", "cispo", "dppo")},
)


def log_ratio(inputs: LossInputs) -> Tensor:
    """log(policy / rollout policy), [R, T], clamped to +-20 and zero at masked positions."""
    difference = torch.where(inputs.mask, inputs.logprobs - inputs.rollout_logprobs, 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def reinforce(inputs: LossInputs, *, truncate: float = 2.0) -> LossOutput:
    """-A * sg[min(r, truncate)] * log policy: policy gradient with a truncated importance weight (IMPALA)."""
    ratio = log_ratio(inputs).detach().exp()
    loss = -inputs.advantages * ratio.clamp(max=truncate) * inputs.logprobs
    return LossOutput(loss, {"clipped": ratio > truncate})


def ppo(
    inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = 3.0
) -> LossOutput:
    """max(-A*r, -A*clip(r, 1-clip_low, 1+clip_high)), at most -A*dual_clip where A < 0.

    Clipping as in arXiv:1707.06347, the asymmetric bounds of DAPO (arXiv:2503.14476), the dual
    clip of arXiv:1912.09729 (``dual_clip`` over 1, or null to leave it out).
    """
    ratio = log_ratio(inputs).exp()
    advantages = inputs.advantages
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        over = (advantages < 0) & (loss > ceiling)
        loss = torch.where(over, ceiling, loss)
        clipped = clipped | over
    return LossOutput(loss, {"clipped": clipped})


def cispo(inputs: LossInputs, *, clip_high: float = 0.28) -> LossOutput:
    """-A * sg[min(r, 1+clip_high)] * log policy: clips the weight, keeps every gradient (arXiv:2506.13585)."""
    ratio = log_ratio(inputs).detach().exp()
    loss = -inputs.advantages * ratio.clamp(max=1 + clip_high) * inputs.logprobs
    return LossOutput(loss, {"clipped": ratio > 1 + clip_high})


def dppo(inputs: LossInputs, *, delta: float = 0.2, tau: float = 1e-3) -> LossOutput:
    """-m*r*A + tau*log(r)^2, with m = 0 where a probability already moved by more than delta.

    m = 0 where A > 0 and p - q > delta, or A < 0 and q - p > delta; p, q the probabilities of the
    token under the policy and the rollout policy. The quadratic term stays on at every loss token.
    """
    log_r = log_ratio(inputs)
    moved = inputs.logprobs.detach().exp() - inputs.rollout_logprobs.exp()
    left_out = ((inputs.advantages > 0) & (moved > delta)) | ((inputs.advantages < 0) & (-moved > delta))
    surrogate = torch.where(left_out, 0.0, -log_r.exp() * inputs.advantages)
    return LossOutput(surrogate + tau * log_r.square(), {"masked": left_out})
