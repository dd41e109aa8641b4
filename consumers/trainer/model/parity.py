"""Parity with generators: a loaded model is made to compute what it computes when it is sampled from, or is refused.

Dropout is not only a layer: many models hand a number to a function (OPT's layers, every attention). All such numbers
are set to 0 in the model's modules. Routers that add noise of their own stay in evaluation mode. Rotary embeddings
whose frequencies depend on the longest row of a pass get those of model.max_length. Whether nothing random is left,
whether training computes what evaluation does, and whether no token sees later ones, is tried out. The model's
configuration keeps its values, for training elsewhere.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd

from schemas.errors import ConfigError

if TYPE_CHECKING:  # importing it takes seconds, and model.kind mlp does not need it
    from transformers import PreTrainedModel

Model = TypeVar("Model", bound="PreTrainedModel")

TOKENS = 64
"""Length of the sequence on which a model is tried out."""
ROUNDING = 1e-4
"""Largest relative difference of two outputs that are the same but for rounding, in float32."""
ROUNDING_16 = 3e-2
"""The same in types of 16 bits."""


def train_without_noise(model: Model, path: str) -> Model:
    """Put a model into training mode without randomness; ConfigError if two passes differ, or evaluation does."""
    model.train()
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)
    for module in model.modules():
        # Jitter is not set to 0, because PhiMoE also uses it as a threshold; these modules stay in evaluation mode.
        if any(isinstance(value, float) and "jitter" in name for name, value in vars(module).items()):
            module.eval()
            module.train = lambda mode=True, module=module: module  # type: ignore[method-assign, misc]
    if model.device.type == "meta":
        return model
    first, second = _logits(model), _logits(model)
    if bool(first.isnan().any()):
        raise ConfigError(
            f"model.path {path!r} cannot be trained: {type(model).__name__} gives logits that are not numbers, so its"
            " weights are broken, or model.dtype is too narrow for them"
        )
    if not torch.equal(first, second):
        raise ConfigError(
            f"model.path {path!r} cannot be trained: two forward passes of {type(model).__name__} over the same tokens"
            " differ, so it has dropout or other noise that Tidemill cannot switch off; set it to 0 in the model's"
            " config.json"
        )
    model.train(False)
    evaluated = _logits(model)
    model.train()
    if not _is_same(first, evaluated):
        raise ConfigError(
            f"model.path {path!r} cannot be trained: {type(model).__name__} computes something else in training than"
            " in evaluation, which generators sample with"
        )
    return model


def check_causal(model: PreTrainedModel, path: str) -> None:
    """Refuse a model in which a token sees later ones, by trying it out; ConfigError names model.path."""
    if model.device.type == "meta":
        return
    tokens = _probe_tokens(model)
    changed = tokens.clone()
    changed[:, -1] = tokens[:, 0]
    if not _is_same(_logits(model, tokens)[:, :-1], _logits(model, changed)[:, :-1]):
        raise ConfigError(
            f"model.path {path!r} cannot be trained: the tokens of {type(model).__name__} see later ones, so it is not"
            " a causal language model"
        )


def fix_rotary_frequencies(model: PreTrainedModel, path: str, max_length: int | None = None) -> None:
    """Give rotary embeddings of the type longrope the frequencies of ``max_length`` in every pass, as vLLM does.

    transformers chooses them by the longest row of each pass, so that a row would be computed differently beside a
    longer one. max_length: most tokens of a row, max_position_embeddings when None. ConfigError for the type dynamic.
    """
    modules: Iterable[Any] = model.modules()
    for module in modules:
        found = getattr(module, "rope_type", None)
        kinds = found if isinstance(found, dict) else {None: found}
        for layer, kind in kinds.items():
            if kind == "longrope":
                _fix_longrope(module, layer, max_length or module.config.max_position_embeddings)
            elif isinstance(kind, str) and "dynamic" in kind:
                _check_dynamic(module, layer, path, max_length)


def _fix_longrope(module: Any, layer: str | None, max_length: int) -> None:
    settings = module.config.rope_parameters if layer is None else module.config.rope_parameters[layer]
    prefix, arguments = ("", {}) if layer is None else (f"{layer}_", {"layer_type": layer})
    device = getattr(module, f"{prefix}inv_freq").device
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scale = ROPE_INIT_FUNCTIONS["longrope"](module.config, device, seq_len=max_length, **arguments)
    module.register_buffer(f"{prefix}inv_freq", frequencies, persistent=False)
    if layer is not None:
        module.rope_type = {**module.rope_type, layer: "default"}
        return
    which = "long_mscale" if max_length > settings["original_max_position_embeddings"] else "short_mscale"
    module.attention_scaling = settings.get(which, scale)
    module.rope_type = "default"
    # PhiMoE asks these two in each pass.
    module.config = copy.copy(module.config)
    module.config.rope_parameters = {**settings, "rope_type": "default"}
    module.rope_init_fn = lambda *_, **__: (module.inv_freq, module.attention_scaling)


def _check_dynamic(module: Any, layer: str | None, path: str, max_length: int | None) -> None:
    """Refuse frequencies that grow with a row, but for those of a fixed alpha (Hunyuan) within the model's length."""
    settings = module.config.rope_parameters if layer is None else module.config.rope_parameters[layer]
    longest = module.config.max_position_embeddings
    if not settings.get("alpha") or (max_length or longest) > longest:
        raise ConfigError(
            f"model.path {path!r} cannot be trained: its rotary embeddings have rope_type {settings['rope_type']!r},"
            " whose frequencies depend on the longest row computed with it; allowed are default, linear, yarn, llama3"
            " and longrope"
        )


def _probe_tokens(model: PreTrainedModel) -> Tensor:
    """Return the tokens on which a model is tried out: int64 [1, T]."""
    config = model.config.get_text_config()
    length = min(TOKENS, getattr(config, "max_position_embeddings", None) or TOKENS)
    tokens: Tensor = torch.arange(1, length + 1, device=model.device)[None] % config.vocab_size
    return tokens


@torch.no_grad()
def _logits(model: PreTrainedModel, tokens: Tensor | None = None) -> Tensor:
    logits: Tensor = model(input_ids=_probe_tokens(model) if tokens is None else tokens, use_cache=False).logits
    return logits


def _is_same(found: Tensor, wanted: Tensor) -> bool:
    """Return whether two outputs are the same but for rounding; logits of -inf are of no token."""
    limit = ROUNDING if found.dtype == torch.float32 else ROUNDING_16
    found, wanted = (values.float().masked_fill(values == -torch.inf, 0.0) for values in (found, wanted))
    error = float((found - wanted).norm() / wanted.norm().clamp(min=1e-9))
    return error < limit
