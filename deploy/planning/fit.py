"""``tidemill plan --gpu``: whether a training fits the cards, before there is any card or any weight.

The trainer's sizes are those of its own step, which a child process computes on shapes (rehearsal.py). An engine has
weights, and keys and values of the samples in flight.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from deploy.planning.cards import (
    ARITHMETIC,
    BANDWIDTH,
    TRANSFER,
    USABLE,
    Card,
    StepTime,
    find_card,
    find_links,
    step_time,
)
from deploy.planning.changes import changes, layouts, rehearse_apart, size_changes
from deploy.planning.cluster import (
    SHARED,
    TYPE_BYTES,
    UTILIZATION,
    VLLM_SHARE,
    bytes_in_4_bits,
    engine_width,
    parallel_size,
)
from deploy.planning.search import place
from schemas.config import TidemillConfig, by_pool
from schemas.config.deploy import parse_ranges
from schemas.config.generator import PARALLEL_SIZES
from schemas.errors import ConfigError
from schemas.model_folder import load_model_config

ENGINE_ACTIVATIONS = 2 << 30
"""Assumed bytes of an engine's own activations and CUDA graphs."""
GIB = 1 << 30
CONFIGURED = "as configured"
PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary")


@dataclass(frozen=True)
class EngineSize:
    """Bytes of an engine on each of its GPUs. samples: of model.max_length tokens that fit at once.

    token: of the cache, for each token of such a sample. rate: tokens a second of an engine that is full, if its memory
    alone limits it. They are None for a model whose layers keep a state.
    """

    share: float
    weights: int
    token: int | None
    samples: int | None
    rate: float | None = None


@dataclass(frozen=True)
class LayoutRow:
    """A layout of the ranks. bytes: of a rank at the peak. left: of the card, below 0 if it does not fit."""

    layout: str
    bytes: int
    left: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """What was computed for a configuration. memory: bytes of a card. room: those that tensors of the trainer can have.

    tried: StepSizes as JSON, the first as configured, the others with the change that they are named after, which
    makes them smaller. times: of each. engines: by pool. layouts: as searched, the best first. trained: tokens a second
    of one GPU of the trainer.
    """

    ranks: int
    memory: int
    room: int
    tried: dict[str, dict[str, Any]]
    times: dict[str, StepTime]
    engines: dict[str, EngineSize]
    layouts: list[LayoutRow]
    trained: float

    @property
    def rates(self) -> tuple[float, float | None]:
        """Tokens a second of a GPU of the trainer, and of a full engine, the mean of those that are known."""
        known = [engine.rate for engine in self.engines.values() if engine.rate]
        return self.trained, sum(known) / len(known) if known else None

    @property
    def best(self) -> str | None:
        """The change that saves most; None if nothing else was tried or saves anything."""
        others = {text: total(one) for text, one in self.tried.items() if text != CONFIGURED}
        return min(others, key=lambda text: others[text]) if others else None


def fit(
    config: TidemillConfig, gpus: int, gpu: str, link: str | None = None, search: bool = False, quiet: bool = False
) -> Fit:
    """Print and return what a rank and an engine need of a card, and what helps if the trainer does not fit.

    link: see find_links. search: compute each layout of the trainer's ranks, to name the fastest. quiet: print nothing.
    """
    card, links, pools, parallel = find_card(gpu), find_links(link, gpu), by_pool(config), config.trainer.parallel
    ranks, shared = trainer_ranks(config, gpus), gpus == 1 and config.placement is None
    room = trainer_room(pools, card.memory, shared)
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
    engines = {
        pool: replace(engine, rate=_sampled(engine, pools[pool], card))
        for pool, engine in size_engines(
            pools, size["model_parameters"], card.memory, shared, size.get("in_4_bits", 0)
        ).items()
    }
    trained = size["tokens"] * size["micro_batches"] / (parallel.tensor * parallel.context) / times[CONFIGURED].total
    found = Fit(ranks, card.memory, room, tried, times, engines, rows, trained)
    if quiet:
        return found
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
    for pool, engine in found.engines.items():
        text = describe_engine(engine, config.model.max_length)
        typer.echo(f"an engine of pool {pool}: {text}" if pool else f"an engine: {text}")
    return found


def describe_engine(engine: EngineSize, max_length: int) -> str:
    """Say what an engine's weights and cache take, and how many samples of ``max_length`` tokens fit."""
    cache = "the cache of this kind of model is not computed"
    if engine.token is not None:
        cache = (
            f"{engine.token / 1024:.0f} KiB for each token in the cache, room for {engine.samples} samples of"
            f" {max_length:,} tokens in {engine.share:.0%} of the card"
        )
    return f"{engine.weights / GIB:.1f} GiB of weights on a GPU, {cache}"


def _sampled(engine: EngineSize, config: TidemillConfig, card: Card) -> float | None:
    """Return a full engine's tokens a second: the samples of a copy, half max_length long, share each reading."""
    if engine.token is None or engine.samples is None:
        return None
    samples = min(engine.samples, config.generator.max_samples)
    of_copy = samples / parallel_size(config, "data_parallel_size")
    read = engine.weights + of_copy * engine.token * config.model.max_length / 2
    return samples * card.tbps * 1e12 * BANDWIDTH / read


def as_json(found: Fit) -> dict[str, Any]:
    """Return all that was computed, as JSON."""
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
        "trained_tokens_per_s": found.trained,
        "engines": {pool: asdict(engine) for pool, engine in found.engines.items()},
        "layouts": [asdict(row) for row in found.layouts],
    }


def _print_verdict(found: Fit) -> None:
    room = found.room / GIB
    left = room - total(found.tried[CONFIGURED]) / GIB
    verdict = f"fits: {left:.1f} GiB are left" if left >= 0 else f"does not fit: {-left:.1f} GiB are missing"
    typer.echo(f"{verdict} of the {room:.1f} that tensors can have")
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
    """Return the ranks of the trainer: of ``placement``, ``trainer.processes``, or what the generators leave."""
    if (placement := config.placement) is not None:
        if placement.is_auto:
            placement, _, _ = place(config, gpus)
        places = parse_ranges(placement.trainer)
        if (last := max(*places, *parse_ranges(placement.generator))) >= gpus:
            raise ConfigError(f"--gpus {gpus} is too few: placement names GPU {last}, counted from 0")
        return len(places)
    unit = config.trainer.parallel.unit
    widths = [engine_width(one) for one in by_pool(config).values() for _ in range(one.generator.replicas)]
    taken = sum(widths)
    given = "processes" in config.trainer.model_fields_set
    ranks = config.trainer.processes if given else max(0, gpus - taken) // unit * unit
    if gpus == 1 and unit == 1:
        return 1
    # Pools have all of their generators, others as many as there is room for.
    if ranks < 1 or ranks + (taken if config.pools else min(widths, default=0)) > gpus:
        raise ConfigError(
            f"--gpus {gpus} is too few: the trainer needs {max(ranks, unit)} (trainer.processes, trainer.parallel) and"
            f" the generators {taken}"
        )
    return ranks


def total(size: Mapping[str, Any]) -> int:
    """Return the bytes at the peak."""
    return sum(int(size[name]) for name in PARTS)


def trainer_room(pools: Mapping[str, TidemillConfig], card_bytes: int, shared: bool) -> int:
    """Return the bytes that tensors of the trainer can have on a card. shared: with all engines, and not in turns."""
    taken = sum(share * pools[pool].generator.replicas for pool, share in vllm_shares(pools, shared).items() if shared)
    return int(card_bytes * USABLE) - int(card_bytes * taken)


def size_engines(
    pools: Mapping[str, TidemillConfig], parameters: int, card_bytes: int, shared: bool, in_4_bits: int = 0
) -> dict[str, EngineSize]:
    """Compute the size of an engine of each pool. parameters, in_4_bits: of the model. shared: see trainer_room."""
    if not (shares := vllm_shares(pools, shared)):
        return {}
    model = next(iter(pools.values())).model
    settings = load_model_config(model.path, model.trust_remote_code).get_text_config()
    found, kind = {}, TYPE_BYTES[model.dtype]
    whole = (parameters - in_4_bits) * kind + bytes_in_4_bits(in_4_bits)
    for pool, share in shares.items():
        tensor, stages, copies = (parallel_size(pools[pool], name) for name in PARALLEL_SIZES)
        share, weights = share or VLLM_SHARE, whole // (tensor * stages)
        sample = _sample_bytes(settings, kind, tensor, stages, model.max_length)
        if sample is None:
            found[pool] = EngineSize(share, weights, None, None)
            continue
        room = share * card_bytes - weights - ENGINE_ACTIVATIONS
        found[pool] = EngineSize(share, weights, sample // model.max_length, copies * max(0, int(room // sample)))
    return found


def vllm_shares(pools: Mapping[str, TidemillConfig], shared: bool) -> dict[str, float]:
    """Return the share of a card for an engine of each pool with generators, 0 if not vLLM. shared: trainer_room's."""
    there = {pool: one.generator for pool, one in pools.items() if one.generator.replicas}
    usual = SHARED / sum(each.replicas for each in there.values()) if shared and there else VLLM_SHARE
    return {
        pool: float(each.args.get(UTILIZATION) or usual) if each.engine in ("auto", "vllm") else 0.0
        for pool, each in there.items()
    }


def _sample_bytes(settings: Any, kind: int, tensor: int, stages: int, longest: int) -> int | None:
    """Return the bytes of a sample in the cache of a GPU; None if a layer keeps something else than the tokens."""
    layers = int(settings.num_hidden_layers)
    window = getattr(settings, "sliding_window", None) or getattr(settings, "attention_chunk_size", None)
    plain = "full_attention" if not window or not getattr(settings, "use_sliding_window", True) else "sliding_attention"
    kinds = getattr(settings, "layer_types", None) or [plain] * layers
    kept = {"full_attention": longest}
    kept |= dict.fromkeys(("sliding_attention", "chunked_attention"), min(longest, window)) if window else {}
    if not kept.keys() >= set(kinds):
        return None
    heads = int(getattr(settings, "num_key_value_heads", None) or settings.num_attention_heads)
    of_head = int(getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads)
    # A head that several ranks need is on each of them; the stages of a pipeline share the layers.
    of_layer = 2 * -(-heads // tensor) * of_head
    if latent := getattr(settings, "kv_lora_rank", None):
        # Every rank keeps what the heads' keys and values are made from (arXiv:2405.04434).
        of_layer = int(latent) + int(settings.qk_rope_head_dim)
    return -(-sum(kept[each] for each in kinds) // stages) * of_layer * kind
