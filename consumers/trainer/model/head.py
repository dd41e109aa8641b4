"""The output layer: log-probabilities and entropies of loss tokens, exact, without all logits at once.

Logits are float32 and divided by the temperature as in generation. They are computed a chunk of tokens at a time, and
again in backward: a full float32 [tokens, vocabulary] never exists, and nothing is approximated. On a CPU a chunk is
small enough that what follows the matrix product finds it in the cache, which pays for the second product in large
part. If the vocabulary is cut over ranks, each computes the logits of its own rows, and the softmax needs three
numbers of each token from the others.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from consumers.trainer.distributed.parts import Part

CPU_LOGITS, CHUNK_LOGITS = 1 << 21, 1 << 26
"""Logits held at once on a CPU and elsewhere: 8 MiB and 256 MiB in float32."""
LEAST_ROWS = 64
"""Tokens of a chunk, also where a vocabulary is so large that they have more logits."""


def score(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    entropy_gradient: bool = False,
    part: Part | None = None,
    rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the log-probability of each target token and the entropy of its distribution, both float32 [M].

    features: [M, H], the last hidden states. weight: [V, H], bias: [V] of the output layer. targets: int64 [M]. Logits
    are computed in the type of the layer, everything after in float32. temperature: one for all, or float32 [M].
    Without ``entropy_gradient`` the entropy has no gradient. part: of the ranks over which the vocabulary is cut;
    weight and bias are then this rank's rows, while features and targets are the same on all of them. rows: of a chunk,
    by default as many as fit.
    """
    fitting = (CPU_LOGITS if weight.device.type == "cpu" else CHUNK_LOGITS) // weight.shape[0]
    logprobs, entropy = _Score.apply(  # type: ignore[no-untyped-call]
        features, weight, bias, targets, temperature, entropy_gradient, part, rows or max(LEAST_ROWS, fitting)
    )
    return logprobs, entropy if entropy_gradient else entropy.detach()


class _Score(torch.autograd.Function):
    """``score`` with a backward of its own, which computes each chunk's logits again instead of keeping them."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float | Tensor,
        entropy_gradient: bool,
        part: Part | None,
        step: int,
    ) -> tuple[Tensor, Tensor]:
        count, own = len(targets), None
        if part is not None:
            # Targets become indices into this rank's rows; one of another rank becomes 0.
            targets = targets - part.rank * weight.shape[0]
            own = (targets >= 0) & (targets < weight.shape[0])
            targets = targets.masked_fill(~own, 0)
        logprobs, entropy, total = features.new_empty((3, count), dtype=torch.float32)
        for start in range(0, count, step):
            chunk = slice(start, start + step)
            logits = _logits(features[chunk], weight, bias, _of(temperature, chunk))
            total[chunk] = torch.logsumexp(logits, -1)
            # From log-probabilities and not from logits, whose size would cost digits.
            logits.sub_(total[chunk, None])
            logprobs[chunk] = logits.gather(-1, targets[chunk, None])[:, 0]
            entropy[chunk] = logits.exp().mul_(logits).sum(-1).neg_()
        if part is not None and own is not None:
            logprobs, entropy, total = _over_ranks(logprobs, own, entropy, total, part)
        ctx.save_for_backward(features, weight, bias, targets, own, total, entropy)
        ctx.temperature, ctx.entropy_gradient, ctx.part, ctx.step = temperature, entropy_gradient, part, step
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprobs: Tensor, of_entropy: Tensor) -> tuple[Tensor | None, ...]:
        features, weight, bias, targets, own, total, entropy = ctx.saved_tensors
        into_features = torch.empty_like(features)
        of_targets = of_logprobs if own is None else of_logprobs.masked_fill(~own, 0.0)
        # Summed over chunks: in float32 whatever the layer's type.
        into_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        into_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
        for start in range(0, len(targets), ctx.step):
            chunk = slice(start, start + ctx.step)
            temperature = _of(ctx.temperature, chunk)
            logits = _logits(features[chunk], weight, bias, temperature)
            logits.sub_(total[chunk, None])
            grad = logits.exp()
            if ctx.entropy_gradient:
                # d entropy / d logit = -p (log p + entropy); d logprob / d logit = [target] - p.
                logits.add_(entropy[chunk, None]).mul_(of_entropy[chunk, None]).add_(of_logprobs[chunk, None])
                grad.mul_(logits).neg_()
            else:
                grad.mul_(-of_logprobs[chunk, None])
            grad.scatter_add_(-1, targets[chunk, None], of_targets[chunk, None])
            if isinstance(temperature, Tensor) or temperature != 1.0:
                grad.div_(temperature)
            if into_bias is not None:
                into_bias.add_(grad.sum(0))
            grad = grad.to(weight.dtype)
            torch.mm(grad, weight, out=into_features[chunk])
            if into_weight is not None:
                if weight.dtype == torch.float32:
                    into_weight.addmm_(grad.t(), features[chunk])
                else:
                    into_weight.add_(grad.t() @ features[chunk])
        if ctx.part is not None:
            dist.all_reduce(into_features, group=ctx.part.group)
        return (
            into_features,
            None if into_weight is None else into_weight.to(weight.dtype),
            None if into_bias is None else into_bias.to(weight.dtype),
            *(None,) * 5,
        )


def _over_ranks(
    logprobs: Tensor, own: Tensor, entropy: Tensor, total: Tensor, part: Part
) -> tuple[Tensor, Tensor, Tensor]:
    """Combine the three values, [M], that each rank has from its rows of the vocabulary.

    With rank i's logarithm of summed exponentials L_i, L = log sum exp L_i and w_i = exp(L_i - L): a token's
    log-probability is that within its rank plus L_i - L, and the entropy is the sum of w_i (H_i - (L_i - L)).
    """
    every = total.new_empty((part.size, len(total)))
    dist.all_gather(list(every.unbind()), total.contiguous(), group=part.group)
    whole = torch.logsumexp(every, 0)
    share = total - whole
    sums = torch.stack([torch.where(own, logprobs + share, 0.0), share.exp() * (entropy - share)])
    dist.all_reduce(sums, group=part.group)
    return sums[0], sums[1], whole


def _of(temperature: float | Tensor, chunk: slice) -> float | Tensor:
    """Return the temperature of a chunk of tokens: the same for all, or [K, 1]."""
    return temperature[chunk, None] if isinstance(temperature, Tensor) else temperature


def _logits(features: Tensor, weight: Tensor, bias: Tensor | None, temperature: float | Tensor) -> Tensor:
    logits = torch.nn.functional.linear(features, weight, bias).float()
    if bias is not None:
        # A token that the bias rules out: 0 * -inf would be NaN.
        logits.clamp_(min=torch.finfo(torch.float32).min / 1e4)
    plain = not isinstance(temperature, Tensor) and temperature == 1.0
    return logits if plain else logits.div_(temperature)
