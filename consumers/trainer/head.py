"""Log-probabilities and entropies from the last hidden states, never holding the logits of all tokens.

A chunk of tokens at a time passes the output layer; backward computes its logits again. Nothing is approximated.
Chunks are small enough on a CPU that what follows the matrix product finds them in its cache, which pays for the
second product in large part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CPU_LOGITS, CHUNK_LOGITS = 1 << 21, 1 << 26
"""Logits held at once on a CPU and elsewhere: 8 MiB and 256 MiB in float32."""
LEAST_ROWS = 64


def score(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution, float32 [M].

    features: [M, H]. weight: [V, H], bias: [V] of the output layer. targets: int64 [M]. Logits are computed in the
    type of the layer, everything after in float32. Without ``entropy_gradient`` the entropy has none.
    """
    logprobs, entropy = _Score.apply(  # type: ignore[no-untyped-call]
        features, weight, bias, targets, temperature, entropy_gradient
    )
    return logprobs, entropy if entropy_gradient else entropy.detach()


def _rows(weight: Tensor) -> int:
    return max(LEAST_ROWS, (CPU_LOGITS if weight.device.type == "cpu" else CHUNK_LOGITS) // weight.shape[0])


def _logits(features: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = torch.nn.functional.linear(features, weight, bias).float()
    if bias is not None:
        # A token that the bias rules out: 0 * -inf would be NaN.
        logits.clamp_(min=torch.finfo(torch.float32).min / 1e4)
    return logits if temperature == 1.0 else logits.div_(temperature)


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        count = len(targets)
        logprobs, entropy, total = features.new_empty((3, count), dtype=torch.float32)
        step = _rows(weight)
        for start in range(0, count, step):
            part = slice(start, start + step)
            logits = _logits(features[part], weight, bias, temperature)
            total[part] = torch.logsumexp(logits, -1)
            # From log-probabilities and not from logits, whose size would cost digits.
            logits.sub_(total[part, None])
            logprobs[part] = logits.gather(-1, targets[part, None])[:, 0]
            entropy[part] = logits.exp().mul_(logits).sum(-1).neg_()
        ctx.save_for_backward(features, weight, bias, targets, total, entropy)
        ctx.temperature, ctx.entropy_gradient = temperature, entropy_gradient
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprobs: Tensor, of_entropy: Tensor) -> tuple[Tensor | None, ...]:
        features, weight, bias, targets, total, entropy = ctx.saved_tensors
        into_features = torch.empty_like(features)
        # Summed over chunks: in float32 whatever the layer's type.
        into_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        into_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
        step = _rows(weight)
        for start in range(0, len(targets), step):
            part = slice(start, start + step)
            logits = _logits(features[part], weight, bias, ctx.temperature)
            logits.sub_(total[part, None])
            grad = logits.exp()
            if ctx.entropy_gradient:
                # d entropy / d logit = -p (log p + entropy); d logprob / d logit = [target] - p.
                logits.add_(entropy[part, None]).mul_(of_entropy[part, None]).add_(of_logprobs[part, None])
                grad.mul_(logits).neg_()
            else:
                grad.mul_(-of_logprobs[part, None])
            grad.scatter_add_(-1, targets[part, None], of_logprobs[part, None])
            if ctx.temperature != 1.0:
                grad.div_(ctx.temperature)
            if into_bias is not None:
                into_bias.add_(grad.sum(0))
            grad = grad.to(weight.dtype)
            torch.mm(grad, weight, out=into_features[part])
            if into_weight is not None:
                if weight.dtype == torch.float32:
                    into_weight.addmm_(grad.t(), features[part])
                else:
                    into_weight.add_(grad.t() @ features[part])
        return (
            into_features,
            None if into_weight is None else into_weight.to(weight.dtype),
            None if into_bias is None else into_bias.to(weight.dtype),
            None,
            None,
            None,
        )
