"""The policy in training: log-probabilities of given tokens from any Hugging Face causal language model.

Sequences are packed where the model allows it (packing.py), and the output layer is computed in chunks of loss tokens
(head.py). Over several ranks a policy may compute a part of each layer or of the tokens; it always returns whole rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from consumers.trainer.data.load_balancing import Cost
from consumers.trainer.data.packed import TokenLayout, lay_out
from consumers.trainer.data.patches import ImageBatch
from consumers.trainer.distributed.parts import ParallelModule
from consumers.trainer.distributed.ranks import local_part
from consumers.trainer.model.head import score
from consumers.trainer.model.packing import switch_to_packing, use_packing
from consumers.trainer.model.parity import check_causal, fix_rotary_frequencies, train_without_noise
from consumers.trainer.model.router_replay import RouterReplay
from consumers.trainer.model.vision import VisionTower
from schemas.arithmetic.products import TILE, fill, use_fixed_products
from schemas.errors import ConfigError
from schemas.messages import Adapter
from schemas.model_folder import check_quantised, keep_layout, load_model_config, resolve_folder

if TYPE_CHECKING:  # importing it takes seconds, and model.kind mlp does not need it
    from transformers import PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class TokenScores:
    """Scores of a micro-batch's tokens; logprobs, with gradient, and entropy: float32 [R, T-1], 0 outside the mask."""

    logprobs: Tensor
    entropy: Tensor


def last_hidden(
    model: PreTrainedModel, tower: VisionTower | None, inputs: Tensor, images: ImageBatch | None, layout: TokenLayout
) -> Tensor:
    """Compute a model's last hidden states of the padded rows ``inputs``, with a vision tower or without."""
    arguments = layout.arguments(inputs)
    base: Any = model.base_model
    if tower is not None:
        ids = arguments.pop("input_ids")
        arguments |= tower.arguments(model, ids, layout.packed, images)
        base = base.language_model
    hidden: Tensor = base(**arguments, use_cache=False).last_hidden_state
    return hidden


class Policy(ParallelModule):
    """A causal language model whose forward returns token scores; it has the output layer, so that FSDP2 wraps it."""

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        adapter: Adapter | None = None,
        vision: VisionTower | None = None,
        output_tokens: Sequence[int] | None = None,
        exact: bool = False,
    ) -> None:
        """Wrap a loaded model. adapter: the part of it that is trained (lora.py); None if all of it is.

        vision: the tower of a model that reads images. output_tokens: sorted ids of the only tokens that have a
        probability; None: all. Other targets are not allowed.
        exact: compute as generators do with generator.exact; ConfigError if the model can't.
        """
        super().__init__()
        self.output_tokens = output_tokens
        self.register_buffer("_output_ids", torch.tensor(output_tokens or [], dtype=torch.int64), persistent=False)
        self.vision = vision
        self.adapter = adapter
        self.causal_lm = causal_lm
        self.chunked = _head_is_plain(causal_lm)
        self.packed = self.chunked and switch_to_packing(causal_lm)
        self.router_replay: RouterReplay | None = None
        self.exact = exact
        if exact:
            if not self.packed and self.device.type != "meta":
                raise ConfigError(f"generator.exact: {type(causal_lm).__name__} can't be packed, or caps its logits")
            use_fixed_products(causal_lm)
        if vision is not None and not self.chunked and not self.device.type == "meta":
            raise ConfigError(
                f"model.kind vision: {type(causal_lm).__name__} scales or caps its logits, which is not supported here"
            )

    @property
    def device(self) -> torch.device:
        """The device of its parameters."""
        return next(self.parameters()).device

    @property
    def tried(self) -> dict[str, bool]:
        return {"packed": self.packed, "chunked": self.chunked}

    def adopt(self, tried: Mapping[str, bool]) -> None:
        self.packed, self.chunked = tried["packed"], tried["chunked"]
        if self.packed:
            use_packing(self.causal_lm)

    @property
    def cost(self) -> Cost:
        """Floating-point operations of a sample's forward pass, by which samples are dealt to ranks."""
        config = self.causal_lm.config.get_text_config()
        embeddings, head = self.causal_lm.get_input_embeddings(), self.causal_lm.get_output_embeddings()
        weights = [cast(Tensor, module.weight) for module in (embeddings, head) if module is not None]
        apart = {id(weight): weight.numel() for weight in weights}
        weights = [p for p in self.causal_lm.parameters() if p.ndim >= 2 and id(p) not in apart]
        # A byte has two weights of 4 bits.
        body = sum(p.numel() if p.is_floating_point() else 2 * p.numel() for p in weights)
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
        temperatures: Sequence[float] = (1.0,),
        entropy_gradient: bool = False,
        images: ImageBatch | None = None,
        routed_experts: Tensor | None = None,
        layout: TokenLayout | None = None,
    ) -> TokenScores:
        """Compute log-probability and entropy of ``targets`` where ``mask`` is set.

        tokens: int64 [R, T], right-padded. targets: int64 [R, T-1], token t+1 at position t. mask: bool [R, T-1].
        lengths: int64 [R], how many of a row's first T-1 tokens are read, the masked ones among them; all when None.
        temperatures: with which each row was sampled, R of them, or one for all.
        entropy_gradient: whether entropy is differentiable (an entropy bonus needs it). images: those that some of the
        tokens stand for; only a model with ``vision`` takes them. routed_experts: int16 [R, T, L, k], choices that the
        routers are given, see ``replay_routers``; these also hold while backward computes layers again. layout: what
        ``lay_out`` returns for these tensors; without it a GPU is waited for.
        """
        if layout is None:
            layout = self.lay_out(tokens, mask, lengths, temperatures, routed_experts)
        inputs = tokens[:, :-1]
        if self.router_replay is not None:
            self.router_replay.set(None if routed_experts is None else layout.tokens_of(routed_experts))
        aims = layout.own_of(targets)
        if self.chunked:
            hidden = layout.states_of(last_hidden(self.causal_lm, self.vision, inputs, images, layout))
            scores = self._score(hidden, aims, layout.temperature, entropy_gradient)
        else:
            logits = layout.states_of(self.causal_lm(input_ids=inputs, use_cache=False).logits)
            allowed, aims = self._allowed(aims)
            logits = logits if allowed is None else logits[:, allowed]
            scores = _score_logits(logits, aims, layout.temperature, entropy_gradient)
        return TokenScores(*(layout.spread(values) for values in scores))

    def lay_out(
        self,
        tokens: Tensor,
        mask: Tensor,
        lengths: Tensor | None = None,
        temperatures: Sequence[float] = (1.0,),
        routed_experts: Tensor | None = None,
    ) -> TokenLayout:
        """Find where the tokens of a micro-batch are computed; tensors as in ``forward``, on the host."""
        if self.exact and lengths is None:
            lengths = torch.full_like(tokens[:, 0], tokens.shape[1] - 1)
        # Images and noted choices of routers belong to tokens of one row.
        share = self.share_prefixes and self.vision is None and routed_experts is None
        return lay_out(
            tokens[:, :-1],
            mask,
            lengths if self.packed else None,
            temperatures,
            context=self.context,
            share=share,
            exact=self.exact,
        )

    def replay_routers(self) -> None:
        """Make routers use the choices given to ``forward``; call this before sharding. ConfigError if they can't."""
        self.router_replay = RouterReplay(self.causal_lm)

    def _score(
        self, features: Tensor, targets: Tensor, temperature: float | Tensor, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        head = self.causal_lm.get_output_embeddings()
        # Of a vocabulary that is cut, the rows of this rank.
        weight, bias = local_part(head.weight), None if head.bias is None else local_part(head.bias)
        allowed, targets = self._allowed(targets)
        if allowed is not None:
            weight, bias = weight[allowed], None if bias is None else bias[allowed]
        part = self.tensor if isinstance(head.weight, DTensor) else None
        if not self.exact:
            return score(features, weight, bias, targets, temperature, entropy_gradient, part)
        count, temperature = len(targets), fill(cast(Tensor, temperature), 1.0)
        found = score(fill(features), weight, bias, fill(targets), temperature, entropy_gradient, rows=TILE)
        return found[0][:count], found[1][:count]

    def _allowed(self, targets: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the ids of the tokens that have a probability, None for all, and targets as indices into them."""
        if self.output_tokens is None:
            return None, targets
        allowed = cast(Tensor, self._output_ids)
        return allowed, torch.searchsorted(allowed, targets)


def load_model(
    path: str | Path,
    dtype: str,
    trust_remote_code: bool = False,
    vision: bool = False,
    empty: bool = False,
    max_length: int | None = None,
    adapted: bool = False,
) -> PreTrainedModel:
    """Load a causal language model for training, in ``dtype`` and without dropout, from a folder or hub id.

    vision: one that reads images, too. empty: without weights, for a rank that gets them from another. max_length: most
    tokens of a row, by default as many as the model has positions. adapted: only an adapter of it is trained, so its
    weights may be quantised. ConfigError says what is wrong.
    """
    quantised = check_quantised(path, adapted=adapted)
    load_model_config(path, trust_remote_code)
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    try:
        model = read_model(kind, path, DTYPES[dtype], trust_remote_code, empty)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path {str(path)!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    if quantised and not empty:
        keep_layout(model)
        _forget_quantisation(model)
    fix_rotary_frequencies(model, str(path), max_length)
    train_without_noise(model, str(path))
    check_causal(model, str(path))
    return model


def read_model(
    kind: Any, path: str | Path, dtype: torch.dtype, trust_remote_code: bool, empty: bool, **settings: Any
) -> PreTrainedModel:
    """Read a model as ``kind``, one of transformers' classes that find out which; OSError or ValueError if it can't be.

    empty: make it without weights, which are on the meta device then. settings: other values in its config.json.
    """
    folder = resolve_folder(path, weights=not empty)
    if not empty:
        model: PreTrainedModel = kind.from_pretrained(
            folder, dtype=dtype, trust_remote_code=trust_remote_code, **settings
        )
        return model
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, **settings)
    # Buffers exist, because the model computes them in its constructor.
    with init_empty_weights(include_buffers=False):
        model = kind.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    # Each tied weight was made by itself.
    model.tie_weights()
    return model


def _forget_quantisation(model: Any) -> None:
    """Have a loaded model saved as one whose weights are dequantised: for those in 4 bits transformers needs all."""
    from transformers.integrations.bitsandbytes import Bnb4bitDeserialize

    model.hf_quantizer = None
    del model.config.quantization_config
    model._weight_conversions = [
        each
        for each in model._weight_conversions or ()
        if not any(isinstance(step, Bnb4bitDeserialize) for step in getattr(each, "operations", ()))
    ]


def _score_logits(
    logits: Tensor, targets: Tensor, temperature: float | Tensor, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Score logits [M, V] of models that scale or cap them: log-probabilities and entropies, float32 [M]."""
    if isinstance(temperature, Tensor):
        temperature = temperature[:, None]
    distribution = torch.log_softmax(logits.float() / temperature, dim=-1)
    logprobs = distribution.gather(-1, targets[:, None]).squeeze(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # exp(-inf) * -inf is NaN: a token of no probability adds nothing to the entropy.
        known = distribution.masked_fill(distribution == -torch.inf, 0.0)
        entropy = -(distribution.exp() * known).sum(-1)
    return logprobs, entropy


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
