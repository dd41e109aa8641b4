"""``tidemill plan --gpu``: whether a training fits the cards, before there is any card or any weight.

The trainer's sizes are those of its own step, which a child process computes on shapes (rehearsal.py). An engine has
weights, and keys and values of the samples in flight.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from consumers.trainer.distributed.layout import has_plain_attention
from deploy.planning.cards import (
    ARITHMETIC,
    BANDWIDTH,
    TRANSFER,
    USABLE,
    Card,
    Links,
    StepTime,
    find_card,
    find_links,
    step_time,
)
from deploy.planning.changes import changes, layouts, rehearse_apart, size_changes
from deploy.planning.cluster import SHARED, TYPE_BYTES, UTILIZATION, VLLM_SHARE, engine_width
from schemas.config import TidemillConfig
from schemas.errors import ConfigError
from schemas.model_folder import resolve_folder

ENGINE_ACTIVATIONS = 2 << 30
"""Assumed bytes of an engine's own activations and CUDA graphs."""
GIB = 1 << 30
CONFIGURED = "as configured"
PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary")


@dataclass(frozen=True)
class EngineSize:
    """Bytes of an engine on each of its GPUs. samples: of model.max_length tokens that fit at once.

    token, samples: None for a model whose layers keep something else than keys and values of every token.
    """

    share: float
    weights: int
    token: int | None
    samples: int | None


@dataclass(frozen=True)
class LayoutRow:
    """A layout of the ranks. bytes: of a rank at the peak. left: of the card, below 0 if it does not fit."""

    layout: str
    bytes: int
    left: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """What was computed for a configuration. room: bytes that tensors of the trainer can have on a card.

    tried: StepSizes as JSON, the first as configured, the others with the change that they are named after, which
    makes them smaller. times: of each. layouts: as searched, the best first.
    """

    ranks: int
    room: int
    tried: dict[str, dict[str, Any]]
    times: dict[str, StepTime]
    engine: EngineSize
    layouts: list[LayoutRow]

    @property
    def best(self) -> str | None:
        """The change that saves most; None if nothing else was tried or saves anything."""
        others = {text: total(one) for text, one in self.tried.items() if text != CONFIGURED}
        return min(others, key=lambda text: others[text]) if others else None


def fit(
    config: TidemillConfig, gpus: int, gpu: str, link: str | None = None, search: bool = False, as_json: bool = False
) -> None:
    """Print what a rank of the trainer and an engine need of a card, and what helps if the trainer does not fit.

    link: see find_links. search: whether each layout of the trainer's ranks is computed, to name the fastest that fits.
    """
    card, links = find_card(gpu), find_links(link, gpu)
    ranks = trainer_ranks(config, gpus)
    found = compute_fit(config, ranks, card, links, shared=gpus == 1, search=search)
    if as_json:
        typer.echo(json.dumps(_as_json(found), indent=2))
        return
    size = found.tried[CONFIGURED]
    typer.echo(
        f"{size['model_parameters'] / 1e9:.2f} B parameters, the trainer on {ranks} of {gpus} {gpu.lower()},"
        f" micro-batches of {size['tokens']:,} tokens, {size['micro_batches']} a rank in a step"
    )
    _print_table(found)
    _print_verdict(found)
    for traffic in sorted(size["traffic"], key=lambda each: -each["sent"]):
        if traffic["sent"] >= GIB / 20:
            beside = "beside the arithmetic" if traffic["overlaps"] else "waited for"
            typer.echo(f"{traffic['dimension']}: {traffic['kind']}, {traffic['sent'] / GIB:.1f} GiB sent, {beside}")
    if size["main_memory"]:
        typer.echo(f"main memory: {size['main_memory'] / GIB:.1f} GiB of a rank's optimizer state")
    typer.echo(f"in each micro-batch the host waits for the GPU in: {', '.join(size['waits']) or 'nothing'}")
    typer.echo(
        f"times assume the longest samples, {ARITHMETIC:.0%} of {card.tflops:g} TFLOPS, {BANDWIDTH:.0%} of"
        f" {card.tbps:g} TB/s of memory, {TRANSFER:.0%} of {links.inside:g} GB/s within a machine and of"
        f" {links.between:g} between machines"
    )
    if search:
        _print_layouts(found.layouts)
    engine, cache = found.engine, "the cache of this kind of model is not computed"
    if engine.token is not None:
        cache = (
            f"{engine.token / 1024:.0f} KiB for each token in the cache, room for {engine.samples} samples of"
            f" {config.model.max_length:,} tokens in {engine.share:.0%} of the card"
        )
    typer.echo(f"an engine: {engine.weights / GIB:.1f} GiB of weights on a GPU, {cache}")


def compute_fit(config: TidemillConfig, ranks: int, card: Card, links: Links, shared: bool, search: bool) -> Fit:
    """Compute the step as configured, and with changes if it does not fit. shared: with an engine on one card."""
    room = int(card.memory * USABLE)
    if shared:
        room -= int(card.memory * vllm_share(config, shared))
    size = rehearse_apart(config, ranks)
    others = size_changes(config, changes(config, ranks, shared)) if total(size) > room else {}
    tried = {CONFIGURED: size, **{text: one for text, one in others.items() if total(one) < total(size)}}
    times = {text: step_time(one, card, links) for text, one in tried.items()}
    rows = [
        LayoutRow(text, total(one), room - total(one), step_time(one, card, links).total)
        for text, one in (size_changes(config, layouts(config, ranks)) if search else {}).items()
    ]
    # Those that fit first, and of these the fastest.
    rows.sort(key=lambda row: (row.left < 0, row.seconds if row.left >= 0 else -row.left))

    return Fit(ranks, room, tried, times, size_engine(config, size["model_parameters"], card.memory, shared), rows)


def _as_json(found: Fit) -> dict[str, Any]:
    sizes = {
        text: {name: value for name, value in one.items() if name != "operators"}
        | {"seconds": {**asdict(found.times[text]), "total": found.times[text].total}}
        for text, one in found.tried.items()
    }
    size = sizes.pop(CONFIGURED)
    return {
        "ranks": found.ranks,
        "room": found.room,
        "fits": total(size) <= found.room,
        "trainer": size,
        "helping": sizes,
        "best": found.best,
        "engine": asdict(found.engine),
        "layouts": [asdict(row) for row in found.layouts],
    }


def _print_verdict(found: Fit) -> None:
    room = found.room / GIB
    left = room - total(found.tried[CONFIGURED]) / GIB
    if left >= 0:
        typer.echo(f"fits: {left:.1f} GiB are left of the {room:.1f} that tensors can have")
    else:
        typer.echo(f"does not fit: {-left:.1f} GiB are missing of the {room:.1f} that tensors can have")
    if (best := found.best) is not None:
        enough = "it fits then" if total(found.tried[best]) <= found.room else "which is not enough by itself"
        typer.echo(f"helps most: {best}, {enough}")


def _print_layouts(rows: list[LayoutRow]) -> None:
    table = Table("layout of the ranks", "GiB of a rank", "left", "seconds of a step")
    for row in rows:
        colour = "green" if row.left >= 0 else "red"
        left = f"[{colour}]{row.left / GIB:.1f}[/]"
        table.add_row(row.layout, f"{row.bytes / GIB:.1f}", left, f"{row.seconds:.1f}")
    Console().print(table)
    if not rows:
        typer.echo("no layout of these ranks could be computed")
        return
    fits = "fastest that fits" if rows[0].left >= 0 else "none fits; nearest"
    typer.echo(f"{fits}: {rows[0].layout}")


def _print_table(found: Fit) -> None:
    tried, times, room = found.tried, found.times, found.room
    table = Table("GiB of a rank")
    for text in tried:
        table.add_column(text, justify="right", overflow="fold")
    for part in PARTS:
        table.add_row(part, *(f"{one[part] / GIB:.1f}" for one in tried.values()))
    table.add_row("total", *(f"{total(one) / GIB:.1f}" for one in tried.values()))
    lefts = [(room - total(one)) / GIB for one in tried.values()]
    table.add_row(f"left of {room / GIB:.1f}", *(f"[{'green' if left >= 0 else 'red'}]{left:.1f}[/]" for left in lefts))
    table.add_section()
    table.add_row("TFLOP of a step", *(f"{one['flops'] / 1e12:,.0f}" for one in tried.values()))
    for name in ("arithmetic", "sharding", "exchanges", "total"):
        table.add_row(f"seconds, {name}", *(f"{getattr(time, name):.1f}" for time in times.values()))
    Console().print(table)


def trainer_ranks(config: TidemillConfig, gpus: int) -> int:
    """Return the ranks of the trainer: ``trainer.processes``, or what the generators leave if that is not set."""
    unit = config.trainer.parallel.unit
    taken = config.generator.replicas * engine_width(config)
    given = "processes" in config.trainer.model_fields_set
    ranks = config.trainer.processes if given else max(0, gpus - taken) // unit * unit
    if gpus == 1 and unit == 1:
        return 1
    if ranks < 1 or ranks + (taken and engine_width(config)) > gpus:
        raise ConfigError(
            f"--gpus {gpus} is too few: the trainer needs {max(ranks, unit)} (trainer.processes, trainer.parallel) and"
            f" the generators {taken}"
        )
    return ranks


def total(size: Mapping[str, Any]) -> int:
    """Return the bytes at the peak."""
    return sum(int(size[name]) for name in PARTS)


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
    room = share * card_bytes - weights - ENGINE_ACTIVATIONS
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
