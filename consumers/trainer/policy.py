"""The policy in training: log-probabilities of given tokens from any Hugging Face causal language model.

Sequences are packed where the model allows it (packing.py). Logits are float32 and divided by the temperature as
in generation. They are made for loss tokens only and in chunks that backward recomputes (head.py): a full float32
[tokens, vocabulary] never exists.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from consumers.trainer.balance import Cost
from consumers.trainer.head import score
from consumers.trainer.packing import pack, switch_to_packing
from schemas.errors import ConfigError
from schemas.messages import Adapter

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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

    def __init__(self, causal_lm: PreTrainedModel, adapter: Adapter | None = None) -> None:
        """adapter: what is trained of the model (lora.py), if not all of it."""
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
        """Floating-point operations of a sample's forward pass, for dealing samples to ranks."""
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
        """Score ``targets`` where ``mask`` is set.

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


def _score_logits(logits: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    """The same as head.score, [M], for models that make something of their own of the logits [M, V]."""
    distribution = torch.log_softmax(logits.float() / temperature, dim=-1)
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
