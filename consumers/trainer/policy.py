"""The policy in training: log-probabilities of given tokens from any Hugging Face causal language model.

Logits are float32 and divided by the temperature as in generation. They are made for loss tokens
only and in chunks that backward recomputes: a full float32 [tokens, vocabulary] never exists.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel

from schemas.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CHUNK_LOGITS = 1 << 25
"""Logits held at once: 128 MiB in float32."""


@dataclass(frozen=True)
class TokenScores:
    """logprobs: float32 [R, T-1] with gradient; entropy: float32 [R, T-1]. Both 0 where the mask is not set."""

    logprobs: Tensor
    entropy: Tensor


class Policy(nn.Module):
    """A causal language model whose forward returns token scores.

    It is one module, head included, so that DDP and FSDP2 wrap it whole::

        policy = Policy(load_model("runs/cache/arithmetic", "float32"))
        scores = policy(tokens, targets, mask, temperature=1.0)
        (scores.logprobs * weights).sum().neg().backward()
    """

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.chunked = _head_is_plain(causal_lm)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(
        self, tokens: Tensor, targets: Tensor, mask: Tensor, temperature: float = 1.0, entropy_gradient: bool = False
    ) -> TokenScores:
        """Score ``targets`` where ``mask`` is set.

        tokens: int64 [R, T], right-padded. targets: int64 [R, T-1], token t+1 at position t. mask: bool [R, T-1].
        entropy_gradient: whether entropy is differentiable (an entropy bonus needs it).
        """
        # Right padding lies after every position that counts: causal attention needs no mask for it.
        inputs = tokens[:, :-1]
        if self.chunked:
            hidden = self.causal_lm.base_model(input_ids=inputs, use_cache=False).last_hidden_state
            features, head = hidden[mask], self.causal_lm.get_output_embeddings()
        else:
            features, head = self.causal_lm(input_ids=inputs, use_cache=False).logits[mask], nn.Identity()
        logprobs, entropy = _score(features, targets[mask], head, temperature, entropy_gradient)
        return TokenScores(_scatter(logprobs, mask), _scatter(entropy, mask))


def load_model(path: str | Path, dtype: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load a causal language model in ``dtype``; ConfigError says what is wrong with ``path``."""
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=DTYPES[dtype], trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path {str(path)!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    # Dropout would make the trainer's log-probabilities differ from the generators'.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train()
    return model


def _score(
    features: Tensor, targets: Tensor, head: nn.Module, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, float32 [M], of M positions with features [M, H]."""
    vocabulary = getattr(head, "out_features", None) or features.shape[-1]
    size = max(1, CHUNK_LOGITS // vocabulary)

    def scores(features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return _score_chunk(head(features), targets, temperature, entropy_gradient)

    if len(targets) <= size:
        return scores(features, targets)
    parts = [
        checkpoint(scores, f, t, use_reentrant=False)
        for f, t in zip(features.split(size), targets.split(size), strict=True)
    ]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _score_chunk(logits: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    distribution = torch.log_softmax(logits, dim=-1)
    logprobs = distribution.gather(-1, targets[:, None]).squeeze(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # exp(-inf) * -inf is NaN: a token of no probability adds nothing to the entropy.
        known = distribution.masked_fill(distribution == -torch.inf, 0.0)
        entropy = -(distribution.exp() * known).sum(-1)
    return logprobs, entropy


def _scatter(values: Tensor, mask: Tensor) -> Tensor:
    """[M] values at the M set positions of mask, zero elsewhere."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)


@torch.no_grad()
def _head_is_plain(model: PreTrainedModel) -> bool:
    """Whether logits are just the output layer over the last hidden state: some models scale or cap them."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or model.base_model is model or head.weight.is_meta:
        return False
    if "input_ids" not in inspect.signature(model.base_model.forward).parameters:
        return False
    tokens = torch.arange(4, device=head.weight.device)[None] % head.out_features
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    return torch.equal(head(hidden), model(input_ids=tokens, use_cache=False).logits)
