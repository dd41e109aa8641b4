"""An engine's use of a card's memory: weights, and keys and values of the samples in flight."""

from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig

from consumers.trainer.distributed.layout import has_plain_attention
from deploy.planning.cluster import SHARED, TYPE_BYTES, UTILIZATION, VLLM_SHARE, engine_width
from schemas.config import TidemillConfig
from schemas.model_folder import resolve_folder

ACTIVATIONS = 2 << 30
"""Assumed bytes of an engine's own activations and CUDA graphs."""


@dataclass(frozen=True)
class EngineSize:
    """Bytes of an engine on each of its GPUs. samples: of model.max_length tokens that fit at once.

    token, samples: None for a model whose layers keep something else than keys and values of every token.
    """

    share: float
    weights: int
    token: int | None
    samples: int | None


def size_engine(config: TidemillConfig, parameters: int, card_bytes: int, shared: bool) -> EngineSize:
    """Compute the size of one engine. parameters: of the model, a number. shared: with the trainer on one card."""
    width, args = engine_width(config), config.generator.args
    share = vllm_share(config, shared) or VLLM_SHARE
    kind = TYPE_BYTES[config.model.dtype]
    weights = parameters * kind // width
    settings = AutoConfig.from_pretrained(
        resolve_folder(config.model.path, weights=False), trust_remote_code=config.model.trust_remote_code
    ).get_text_config()
    token = _token_bytes(settings, kind, int(args.get("tensor_parallel_size", 1)), width, config.model.max_length)
    if token is None:
        return EngineSize(share, weights, None, None)
    room = share * card_bytes - weights - ACTIVATIONS
    return EngineSize(share, weights, token, max(0, int(room // (token * config.model.max_length))))


def vllm_share(config: TidemillConfig, shared: bool) -> float:
    """Return the share of a card that vLLM takes, 0 for other engines. shared: with the trainer on one card."""
    if config.generator.engine not in ("auto", "vllm"):
        return 0.0
    return float(config.generator.args.get(UTILIZATION) or (SHARED if shared else VLLM_SHARE))


def _token_bytes(settings: Any, kind: int, tensor: int, width: int, max_length: int) -> int | None:
    if not has_plain_attention(settings, max_length) or getattr(settings, "kv_lora_rank", None):
        return None
    heads = int(getattr(settings, "num_key_value_heads", None) or settings.num_attention_heads)
    of_head = int(getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads)
    # A head that several ranks need is on each of them; the rest of the width cuts layers.
    layers = -(-int(settings.num_hidden_layers) // (width // tensor))
    return 2 * layers * -(-heads // tensor) * of_head * kind
