"""The size of a training step, and how that of a deep model follows from two shallow ones of the same kind."""

import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from consumers.trainer.model.policy import Policy
from schemas.config import TidemillConfig, dump_config, parse_config
from schemas.errors import ConfigError
from schemas.model_folder import load_model_config, resolve_folder

LEAST_LAYERS, MORE_LAYERS = 3, 2
"""Layers of the smaller model that is computed in place of a large one, and how many the larger has more."""
SMALL_TOWER: dict[str, Any] = {"depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 4}
SMALL_TOWER |= {"out_hidden_size": 64, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [1]}
"""Sizes of a small tower for a small model of text."""


@dataclass(frozen=True)
class Traffic:
    """What a rank sends in a step by one kind of collective. dimension: of the mesh, ``world`` for all ranks.

    size: ranks of the group. span: how many there are from its first to its last. overlaps: whether it is done beside
    the arithmetic. sent: bytes.
    """

    dimension: str
    kind: str
    size: int
    span: int
    overlaps: bool
    sent: int


@dataclass(frozen=True)
class StepSize:
    """Bytes of one rank at the peak of a step, and its work in a whole step.

    model_parameters: of the whole model, a number. activations: kept for backward. temporary: gathered weights and
    whatever else is in memory at the peak. tokens: of a micro-batch, of which a step has ``micro_batches``. flops: of
    one rank. operators: FLOPs, bytes read and written, and how often operators with these are called. waits: functions
    in which the host waits for the device in each micro-batch; step_waits: once a step. main_memory: bytes of the
    optimizer's state that are there, and not on the card. in_4_bits: of the model's parameters, a number.
    """

    model_parameters: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    temporary: int
    tokens: int
    micro_batches: int
    flops: int
    operators: list[tuple[int, int, int]]
    traffic: list[Traffic]
    waits: list[str]
    step_waits: list[str]
    main_memory: int = 0
    in_4_bits: int = 0


def find_depths(empty: PreTrainedModel) -> tuple[int, int, int] | None:
    """Return two small numbers of layers from which the sizes of a model follow, and its own; None if it has few.

    From some layer on the layers repeat: all are alike, or each n-th has other attention or experts.
    """
    settings = empty.config.get_text_config()
    layers = max((m for m in empty.modules() if isinstance(m, nn.ModuleList)), key=len, default=nn.ModuleList())
    count = len(layers)
    if count != settings.num_hidden_layers:
        return None
    kinds = getattr(settings, "layer_types", None) or [None] * count
    seen = [([(name, p.shape) for name, p in layer.named_parameters()], kinds[i]) for i, layer in enumerate(layers)]
    for period in range(1, 9):
        first = next((i for i in range(count) if seen[i : count - period] == seen[i + period :]), count)
        first += (count - first) % period
        low = first + period * math.ceil(LEAST_LAYERS / period)
        high = low + period * math.ceil(MORE_LAYERS / period)
        if first <= count // 4 and high < count:
            return low, high, count
    return None


def try_small(config: TidemillConfig) -> dict[str, bool]:
    """Find out what a policy does with such a model, packed or padded, on a small real one of the same kind."""
    settings = load_model_config(config.model.path, config.model.trust_remote_code)
    try:
        kind: Any = AutoModelForImageTextToText if config.model.kind == "vision" else AutoModelForCausalLM
        model = kind.from_config(shrink(settings), dtype=torch.float32)
        return Policy(model.eval()).tried
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise ConfigError(
            f"model.path {config.model.path!r} ({settings.model_type}) cannot be sized: a small model of this kind"
            f" cannot be made ({str(error).splitlines()[0]})"
        ) from error


def shrink(settings: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of a model of the same kind, with two layers and small sizes."""
    values = settings.to_dict()
    small = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    values |= {name: size for name, size in small.items() if isinstance(values.get(name), int)}
    if isinstance(kinds := values.get("layer_types"), list):
        values["layer_types"] = kinds[:2]
    if "num_hidden_layers" in values:
        # A model of one layer names the kind of one.
        values["num_hidden_layers"] = min(small["num_hidden_layers"], settings.num_hidden_layers)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        values[name] = None
    if "text_config" in values:
        values["text_config"] = shrink(settings.get_text_config()).to_dict()
    if isinstance(rope := values.get("rope_parameters"), dict) and "mrope_section" in rope:
        rope["mrope_section"] = [2, 3, 3]
    if isinstance(tower := values.get("vision_config"), dict):
        tower |= {name: size for name, size in SMALL_TOWER.items() if name in tower}
    return type(settings).from_dict(values)


@contextmanager
def cut_to(config: TidemillConfig, layers: int, checkpointed: bool) -> Iterator[TidemillConfig]:
    """Yield the configuration of a model cut to ``layers``. checkpointed: for activation_checkpointing ``auto``."""
    folder = resolve_folder(config.model.path, weights=False)
    with tempfile.TemporaryDirectory() as cut:
        for file in Path(folder).iterdir():
            if file.suffix == ".py" or file.name in ("preprocessor_config.json", "processor_config.json"):
                Path(cut, file.name).symlink_to(file.resolve())
        values = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
        for part in (values, values.get("text_config")):
            if isinstance(part, dict) and "num_hidden_layers" in part:
                part["num_hidden_layers"] = layers
                if isinstance(kinds := part.get("layer_types"), list):
                    part["layer_types"] = kinds[:layers]
        Path(cut, "config.json").write_text(json.dumps(values), encoding="utf-8")
        changed = dump_config(config)
        changed["model"] = {**changed["model"], "path": cut}
        if config.trainer.activation_checkpointing == "auto":
            changed["trainer"] = {**changed.get("trainer", {}), "activation_checkpointing": checkpointed}
        yield parse_config(changed)


def extrapolate(low: StepSize, high: StepSize, times: float) -> StepSize:
    """Return ``low`` with ``times`` the difference to ``high``: every size and count grows evenly with the layers."""

    def whole(a: float, b: float) -> int:
        return round(a + (b - a) * times)

    sizes = {
        each.name: whole(getattr(low, each.name), getattr(high, each.name))
        for each in fields(StepSize)
        if each.name not in ("operators", "traffic", "waits", "step_waits")
    }
    calls = [{(flops, moved): n for flops, moved, n in size.operators} for size in (low, high)]
    sent = [{replace(each, sent=0): each.sent for each in size.traffic} for size in (low, high)]
    # What all layers do in one call has another size at each depth: its call counts below zero keep the sums right.
    operators = [(*key, whole(calls[0].get(key, 0), calls[1].get(key, 0))) for key in {**calls[0], **calls[1]}]
    traffic = [replace(key, sent=whole(sent[0].get(key, 0), sent[1].get(key, 0))) for key in {**sent[0], **sent[1]}]
    return StepSize(**sizes, operators=operators, traffic=traffic, waits=high.waits, step_waits=high.step_waits)
