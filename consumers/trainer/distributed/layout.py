"""Which rank has which part: the sizes of the trainer's mesh, and whether a model can be cut so.

Ranks are numbered with tensor innermost, then context, shard and replicate: neighbours, which exchange most, are on
one machine.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from schemas.config import ParallelConfig
from schemas.errors import ConfigError
from schemas.model_folder import load_model_config

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
"""Sizes of which tensor parallelism gives every rank an equal part; a vocabulary that does not divide stays whole."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh (replicate, shard, context, tensor); its ranks are their product.

    A data part is a block of context x tensor ranks, which train the same samples. expert: over how many of tensor's
    ranks experts are dealt out whole.
    """

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @classmethod
    def of(cls, world: int, parallel: ParallelConfig) -> Self:
        """Lay out ``world`` ranks; what the configuration leaves over is shard. ConfigError if nothing whole is."""
        if world % parallel.unit:
            raise ConfigError(
                f"the trainer has {world} processes, which must be a multiple of {parallel.unit}, the product of"
                f" trainer.parallel ({parallel.sizes})"
            )
        shard = world // parallel.unit
        return cls(parallel.replicate, shard, parallel.context, parallel.tensor, parallel.expert)

    @property
    def dp_size(self) -> int:
        """Number of data parts: blocks of ranks that train different samples."""
        return self.replicate * self.shard

    def dp_rank_of(self, rank: int) -> int:
        """Return the index of the data part that a rank is in."""
        return rank // (self.context * self.tensor)

    @property
    def gradient_parts(self) -> int:
        """Over how many ranks sharding takes the mean of a gradient that should be a sum."""
        return self.replicate * self.shard * self.context

    @property
    def parallel(self) -> dict[str, int]:
        """The settings that make this layout of as many ranks."""
        return {name: size for name, size in asdict(self).items() if name != "shard"}


def check_model(path: str | Path, layout: Layout, trust_remote_code: bool = False) -> None:
    """Refuse, by its config.json alone, a model that a layout cannot cut: ConfigError says what does not divide."""
    if layout.tensor == 1 and layout.context == 1:
        return
    config = load_model_config(path, trust_remote_code).get_text_config()
    problem = _tensor_problem(config, layout) or _context_problem(config, layout)
    if problem is not None:
        raise ConfigError(f"model {str(path)!r} ({config.model_type}): {problem}")


def has_plain_attention(config: Any) -> bool:
    """Return whether each layer of a model attends to the tokens before it: all of them, or those of a window.

    Others have chunks, a state that runs on, or windows of a setting that is not ``sliding_window``.
    """
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    return not kinds or (kinds == {"sliding_attention"} and isinstance(getattr(config, "sliding_window", None), int))


def has_windows(config: Any, longest: float = math.inf) -> bool:
    """Return whether some layer of a model attends to a window of fewer tokens than ``longest``."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    in_use = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
    return isinstance(window, int) and bool(in_use) and 0 < window < longest


def number_of_experts(config: Any) -> int:
    """Return the number of experts in each layer of a mixture; 0 for another model."""
    return next((int(getattr(config, name)) for name in _EXPERTS if getattr(config, name, None)), 0)


def _heads(config: Any) -> tuple[int, int]:
    heads = int(config.num_attention_heads)
    return heads, int(getattr(config, "num_key_value_heads", None) or heads)


def _tensor_problem(config: Any, layout: Layout) -> str | None:
    tensor = layout.tensor
    if tensor == 1:
        return None
    if not getattr(config, "base_model_tp_plan", None):
        return f"transformers has no tensor-parallel plan for it, so trainer.parallel.tensor {tensor} must be 1"
    from transformers.activations import ACT2FN

    activation = getattr(config, "hidden_act", None)
    if isinstance(activation, str) and activation in ACT2FN and [*ACT2FN[activation].parameters()]:
        return (
            f"its activation function {activation} has parameters, which transformers' tensor-parallel plan leaves out,"
            f" so trainer.parallel.tensor {tensor} must be 1"
        )
    heads, kv_heads = _heads(config)
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    sizes |= {name: value for name in _WIDTHS if isinstance(value := getattr(config, name, None), int)}
    if layout.expert > 1:
        experts = number_of_experts(config)
        if not experts or not getattr(config, "base_model_ep_plan", None):
            return f"transformers has no plan for experts of it, so trainer.parallel.expert {layout.expert} must be 1"
        sizes["number of experts"] = experts
    for name, size in sizes.items():
        if size % tensor:
            return f"its {name} {size} cannot be cut into trainer.parallel.tensor {tensor} equal parts"
    return None


def _context_problem(config: Any, layout: Layout) -> str | None:
    context, tensor = layout.context, layout.tensor
    if context == 1:
        return None
    if not has_plain_attention(config):
        return (
            f"it has layers with chunked or linear attention, whose tokens cannot be exchanged for heads, so"
            f" trainer.parallel.context {context} must be 1"
        )
    heads, kv_heads = (number // tensor for number in _heads(config))
    of_rank = f" of a rank at trainer.parallel.tensor {tensor}" if tensor > 1 else ""
    if heads % context:
        return f"its {heads} attention heads{of_rank} cannot be dealt to trainer.parallel.context {context}"
    if kv_heads % context and context % kv_heads:
        return (
            f"its {kv_heads} heads of keys and values{of_rank} must divide trainer.parallel.context {context}, or be a"
            " multiple of it"
        )
    return None
