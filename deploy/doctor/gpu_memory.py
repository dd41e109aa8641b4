"""An estimate of the GPU memory that a run needs, from the model's config.json alone: nothing is loaded.

Weights, gradients and optimizer are exact. Activations are a rough estimate for a transformer with flash attention
(after Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022). Memory of the libraries
is not counted, except for RESERVE_GB.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deploy.launchers.gpus import Gpu, GpuPlan
from deploy.planning.cluster import TYPE_BYTES, UTILIZATION, VLLM_SHARE, engine_width
from producers.engines.factory import engine_name
from schemas.config import TidemillConfig, of_node
from schemas.config.trainer import CHECKPOINTED_FROM

GB = 1024**3
ACTIVATIONS = 17
"""Vectors of the hidden size that a layer keeps of each token for its backward pass."""
RESERVE_GB = 1.5
"""Memory that vLLM needs beside weights and cache: activations, CUDA graphs, libraries."""
UNGATED = frozenset({"gpt2", "gpt_neox", "gptj", "gpt_neo", "opt", "bloom", "phi", "falcon", "gpt_bigcode"})
"""Model types whose feed-forward has two matrices instead of three."""


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a transformer. linear: inputs plus outputs of all its linear layers, for adapters. cache: numbers that
    the KV cache holds of each token."""

    parameters: int
    hidden: int
    layers: int
    linear: int
    cache: int


def model_size(config: Mapping[str, Any]) -> ModelSize | None:
    """Read model dimensions from config.json; None if the architecture is unknown."""
    config = config.get("text_config") or config

    def first(*names: str, default: int = 0) -> int:
        return next((int(config[name]) for name in names if isinstance(config.get(name), int)), default)

    hidden = first("hidden_size", "n_embd", "d_model")
    layers = first("num_hidden_layers", "n_layer", "num_layers")
    vocabulary = first("vocab_size")
    heads = first("num_attention_heads", "n_head")
    if not (hidden and layers and vocabulary and heads):
        return None
    kv_heads = first("num_key_value_heads", default=heads)
    width = first("head_dim", default=hidden // heads)
    experts = first("num_local_experts", "num_experts", "n_routed_experts")
    inner = first("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    if experts:
        inner = first("moe_intermediate_size", default=inner)
    matrices = 2 if config.get("model_type") in UNGATED else 3
    attention = 2 * hidden * width * (heads + kv_heads)
    feed_forward = max(1, experts) * matrices * hidden * inner
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings", True) else 2)
    return ModelSize(
        parameters=embeddings + layers * (attention + feed_forward + 2 * hidden) + hidden,
        hidden=hidden,
        layers=layers,
        linear=layers * (4 * hidden + 2 * width * (heads + kv_heads) + max(1, experts) * matrices * (hidden + inner)),
        cache=2 * layers * kv_heads * width,
    )


OPTIMIZER_BYTES = {"adamw": 8, "adamw_8bit": 2, "muon": 4}
"""Bytes of the state for a parameter; with muon embeddings and output layer have twice as many."""


@dataclass(frozen=True)
class Need:
    """GB that trainer or generator needs of one GPU, by name. capacity: GB that it may use, None if unknown."""

    parts: Mapping[str, float]
    capacity: float | None

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.capacity is None or self.total <= self.capacity

    def __str__(self) -> str:
        parts = " + ".join(f"{size:.1f} {name}" for name, size in self.parts.items())
        room = "" if self.capacity is None else f" of {self.capacity:.0f}"
        return f"{parts} = {self.total:.1f}{room} GB on each GPU"


def trainer_need(config: TidemillConfig, size: ModelSize, memory_gb: float | None) -> Need:
    """Return the memory that the trainer needs of each GPU. memory_gb: the part of a GPU that the trainer may use."""
    trainer, small = config.trainer, TYPE_BYTES[config.model.dtype]
    # A model that is not replicated is divided over the ranks.
    ranks = max(1, trainer.processes // trainer.parallel.replicate)
    trained, frozen = size.parameters, 0.0
    if trainer.lora is not None:
        trained, frozen = trainer.lora.rank * size.linear, float(size.parameters * small)
    kept = size.layers * ACTIVATIONS
    checkpointing = trainer.activation_checkpointing
    if checkpointing == "auto":
        checkpointing = size.parameters >= CHECKPOINTED_FROM
    if checkpointing:
        # The input of each layer, unless it is offloaded to main memory, and the output of attention.
        inputs = 0 if trainer.activation_offload else size.layers
        kept = inputs + (size.layers if checkpointing == "selective" else 0) + ACTIVATIONS
    parts = {
        "weights": (4 * trained + frozen) / ranks,
        "gradients": 4 * trained / ranks,
        "optimizer": OPTIMIZER_BYTES[trainer.optimizer.name] * trained / ranks,
        "activations, roughly": float(trainer.micro_batch_tokens * size.hidden * kept * small),
    }
    if trainer.has_second_model and trainer.kl.device != "cpu":
        parts["reference"] = size.parameters * small / ranks
    if trainer.critic is not None:
        parts["critic"] = 16 * size.parameters / ranks
    return Need({name: size / GB for name, size in parts.items()}, memory_gb)


def describe_cache(config: TidemillConfig, size: ModelSize, memory_gb: float, share: float) -> tuple[bool, str]:
    """Return whether the model fits into the engine's share of each GPU, and a text on the room for its KV cache."""
    small, width = TYPE_BYTES[config.model.dtype], engine_width(config)
    weights = size.parameters * small / width / GB
    left = share * memory_gb - weights - RESERVE_GB
    tokens = left * GB * width / (size.cache * small)
    text = f"{weights:.1f} weights, of {share:g} of {memory_gb:.0f} GB on each GPU"
    if tokens < config.model.max_length:
        return False, f"{text}: the KV cache cannot hold one sample of model.max_length {config.model.max_length}"
    return True, f"{text}: {left:.1f} GB of KV cache, {tokens:,.0f} tokens"


def check_memory_fits(
    config: TidemillConfig, size: ModelSize, gpus: list[Gpu], plan: GpuPlan
) -> list[tuple[str, bool, str]]:
    """Return name, whether it fits, and a text for trainer and generator. Without GPUs, only the trainer's need."""
    memory = gpus[0].memory_gb if gpus else None
    generators = {
        pool: one
        for pool, one in of_node(plan.apply(config), "").items()
        if one.generator.replicas and engine_name(one.generator.engine) == "vllm"
    }
    shares = {pool: float(one.generator.args.get(UTILIZATION, VLLM_SHARE)) for pool, one in generators.items()}
    for_trainer = memory
    # In turns, each side has the whole GPU.
    if memory is not None and not plan.sharing and (len(gpus) == 1 or not plan.trainer):
        taken = sum(shares[pool] * one.generator.replicas for pool, one in generators.items())
        for_trainer = memory * max(0.0, 1 - taken)
    need = trainer_need(config, size, for_trainer)
    found = [("trainer memory", need.fits, f"{size.parameters / 1e6:,.0f}M parameters: {need}")]
    for pool, one in generators.items():
        if memory is None:
            break
        fits, text = describe_cache(one, size, memory, shares[pool])
        found.append(("generator memory", fits, f"pool {pool}: {text}" if pool else text))
    return found
