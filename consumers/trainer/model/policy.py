"""The policy in training: log-probabilities of given tokens from any Hugging Face causal language model.

Sequences are packed where the model allows it (packing.py). Logits are float32 and divided by the temperature as in
generation. They are computed for loss tokens only, a chunk of tokens at a time, and again in backward: a full float32
[tokens, vocabulary] never exists, and nothing is approximated. On a CPU a chunk is small enough that what follows the
matrix product finds it in the cache, which pays for the second product in large part.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AutoModelForCausalLM, PreTrainedModel

from consumers.trainer.data.load_balancing import Cost
from consumers.trainer.model.dropout import train_without_dropout
from consumers.trainer.model.packing import pack, switch_to_packing
from schemas.errors import ConfigError
from schemas.messages import Adapter

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CPU_LOGITS, CHUNK_LOGITS = 1 << 21, 1 << 26
"""Logits held at once on a CPU and elsewhere: 8 MiB and 256 MiB in float32."""
LEAST_ROWS = 64
"""Tokens of a chunk, also where a vocabulary is so large that they have more logits."""


@dataclass(frozen=True)
class TokenScores:
    """Scores of a micro-batch's tokens; logprobs, with gradient, and entropy: float32 [R, T-1], 0 outside the mask."""

    logprobs: Tensor
    entropy: Tensor


class Policy(nn.Module):
    """A causal language model whose forward returns token scores.

    The output layer is a part of the module, so that DDP and FSDP2 wrap all of it::

        policy = Policy(load_model("runs/cache/arithmetic", "float32"))
        scores = policy(tokens, targets, mask, temperature=1.0)
        (scores.logprobs * weights).sum().neg().backward()
    """

    def __init__(self, causal_lm: PreTrainedModel, adapter: Adapter | None = None) -> None:
        """Wrap a loaded model. adapter: the part of it that is trained (lora.py); None when all of it is."""
        super().__init__()
        self.adapter = adapter
        self.causal_lm = causal_lm
        self.chunked = _head_is_plain(causal_lm)
        self.packed = self.chunked and switch_to_packing(causal_lm)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def cost(self) -> Cost:
        """Floating-point operations of a sample's forward pass, by which samples are dealt to ranks."""
        config = self.causal_lm.config.get_text_config()
        embeddings, head = self.causal_lm.get_input_embeddings(), self.causal_lm.get_output_embeddings()
        weights = [cast(Tensor, module.weight) for module in (embeddings, head) if module is not None]
        apart = {id(weight): weight.numel() for weight in weights}
        body = sum(p.numel() for p in self.causal_lm.parameters() if p.ndim >= 2 and id(p) not in apart)
        return Cost(
            token=2.0 * body,
            square=2.0 * config.num_hidden_layers * config.hidden_size,
            loss=2.0 * apart.get(id(getattr(head, "weight", None)), 0),
        )

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        mask: Tensor,
        lengths: Tensor | None = None,
        temperature: float = 1.0,
        entropy_gradient: bool = False,
    ) -> TokenScores:
        """Log-probability and entropy of ``targets`` where ``mask`` is set.

        tokens: int64 [R, T], right-padded. targets: int64 [R, T-1], token t+1 at position t. mask: bool [R, T-1].
        lengths: int64 [R], how many of a row's first T-1 tokens are read, the masked ones among them; all when None.
        entropy_gradient: whether entropy is differentiable (an entropy bonus needs it).
        """
        inputs = tokens[:, :-1]
        head = self.causal_lm.get_output_embeddings()
        if self.packed and lengths is not None:
            packed = pack(inputs, lengths)
            hidden = self.causal_lm.base_model(**packed.arguments(), use_cache=False).last_hidden_state[0]
            features = hidden[mask[packed.rows]]
        elif self.chunked:
            # Right padding lies after every position that counts: causal attention needs no mask for it.
            features = self.causal_lm.base_model(input_ids=inputs, use_cache=False).last_hidden_state[mask]
        if self.chunked:
            scores = score(features, head.weight, head.bias, targets[mask], temperature, entropy_gradient)
        else:
            logits = self.causal_lm(input_ids=inputs, use_cache=False).logits[mask]
            scores = _score_logits(logits, targets[mask], temperature, entropy_gradient)
        return TokenScores(*(_scatter(values, mask) for values in scores))


def load_model(path: str | Path, dtype: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load a causal language model for training, in ``dtype`` and without dropout, from a folder or hub id.

    ConfigError says what is wrong.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=DTYPES[dtype], trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path {str(path)!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    return train_without_dropout(model, str(path))


def score(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target token and entropy of its distribution, both float32 [M].

    features: [M, H], the last hidden states. weight: [V, H], bias: [V] of the output layer. targets: int64 [M]. Logits
    are computed in the type of the layer, everything after in float32. Without ``entropy_gradient`` the entropy has no
    gradient.
    """
    logprobs, entropy = _Score.apply(  # type: ignore[no-untyped-call]
        features, weight, bias, targets, temperature, entropy_gradient
    )
    return logprobs, entropy if entropy_gradient else entropy.detach()


def _score_logits(logits: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    """``score`` from logits [M, V], for models that scale or cap them: log-probabilities and entropies, float32 [M]."""
    distribution = torch.log_softmax(logits.float() / temperature, dim=-1)
    logprobs = distribution.gather(-1, targets[:, None]).squeeze(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # exp(-inf) * -inf is NaN: a token of no probability adds nothing to the entropy.
        known = distribution.masked_fill(distribution == -torch.inf, 0.0)
        entropy = -(distribution.exp() * known).sum(-1)
    return logprobs, entropy


class _Score(torch.autograd.Function):
    """``score`` with a backward of its own, which computes each chunk's logits again instead of keeping them."""

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


def _logits(features: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = torch.nn.functional.linear(features, weight, bias).float()
    if bias is not None:
        # A token that the bias rules out: 0 * -inf would be NaN.
        logits.clamp_(min=torch.finfo(torch.float32).min / 1e4)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _rows(weight: Tensor) -> int:
    return max(LEAST_ROWS, (CPU_LOGITS if weight.device.type == "cpu" else CHUNK_LOGITS) // weight.shape[0])


def _scatter(values: Tensor, mask: Tensor) -> Tensor:
    """Values [M] at the M positions that are set in ``mask`` [R, T-1], zero elsewhere."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)


@torch.no_grad()
def _head_is_plain(model: PreTrainedModel) -> bool:
    """Try whether the logits are just the output layer over the last hidden state: some models scale or cap them."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or model.base_model is model or head.weight.is_meta:
        return False
    if "input_ids" not in inspect.signature(model.base_model.forward).parameters:
        return False
    tokens = torch.arange(4, device=head.weight.device)[None] % head.out_features
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    return torch.equal(head(hidden), model(input_ids=tokens, use_cache=False).logits)
