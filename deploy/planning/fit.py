"""``tidemill plan --gpu``: whether a training fits the cards, before there is any card or any weight.

Each size is that of the trainer's own step, which a child process computes on shapes (rehearsal.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from deploy.launchers.gpus import engine_width, shared_utilization
from deploy.planning.cards import ARITHMETIC, BANDWIDTH, TRANSFER, USABLE, StepTime, find_card, find_links, step_time
from schemas.config import TidemillConfig, dump_config, parse_config
from schemas.errors import ConfigError, TidemillError

GIB = 1 << 30
LIMIT_S = 600.0
PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary")


@dataclass(frozen=True)
class PlanChange:
    """A single setting that may make a training fit, as it is written on the command line. ranks: of the trainer."""

    text: str
    ranks: int
    trainer: dict[str, Any]


def fit(config: TidemillConfig, gpus: int, gpu: str, link: str | None, as_json: bool) -> None:
    """Print what a rank of the trainer and an engine need of a card, and what helps if the trainer does not fit.

    link: see find_links.
    """
    card, links = find_card(gpu), find_links(link, gpu)
    shared = gpus == 1
    ranks = trainer_ranks(config, gpus)
    room = int(card.memory * USABLE)
    if shared:
        room -= int(card.memory * (shared_utilization(config, 1) or 0.0))
    size = rehearse_apart(config, ranks)
    others = _tried(config, ranks, shared) if total(size) > room else {}
    helping = {text: one for text, one in others.items() if total(one) < total(size)}
    best = min(helping, key=lambda text: total(helping[text])) if helping else None

    from deploy.planning.engine_size import size_engine

    engine = size_engine(config, size["model_parameters"], card.memory, shared)
    tried = {"as configured": size, **helping}
    times = {text: step_time(one, card, links) for text, one in tried.items()}
    if as_json:
        sizes = [{name: value for name, value in one.items() if name != "operators"} for one in tried.values()]
        rows = {text: {**one, "seconds": asdict(times[text])} for text, one in zip(tried, sizes, strict=True)}
        found = {"ranks": ranks, "room": room, "fits": total(size) <= room, "trainer": rows.pop("as configured")}
        typer.echo(json.dumps({**found, "helping": rows, "best": best, "engine": asdict(engine)}, indent=2))
        return
    typer.echo(
        f"{size['model_parameters'] / 1e9:.2f} B parameters, the trainer on {ranks} of {gpus} {gpu.lower()},"
        f" micro-batches of {size['tokens']:,} tokens, {size['micro_batches']} a rank in a step"
    )
    _print_table(tried, times, room)
    missing = (total(size) - room) / GIB
    if missing <= 0:
        typer.echo(f"fits: {-missing:.1f} GiB are left of the {room / GIB:.1f} that tensors can have")
    else:
        typer.echo(f"does not fit: {missing:.1f} GiB are missing of the {room / GIB:.1f} that tensors can have")
    if best is not None:
        enough = "it fits then" if total(helping[best]) <= room else "which is not enough by itself"
        typer.echo(f"helps most: {best}, {enough}")
    for traffic in sorted(size["traffic"], key=lambda each: -each["sent"]):
        if traffic["sent"] >= GIB / 20:
            beside = "beside the arithmetic" if traffic["overlaps"] else "waited for"
            typer.echo(f"{traffic['dimension']}: {traffic['kind']}, {traffic['sent'] / GIB:.1f} GiB sent, {beside}")
    typer.echo(
        f"times assume the longest samples, {ARITHMETIC:.0%} of {card.tflops:g} TFLOPS, {BANDWIDTH:.0%} of"
        f" {card.tbps:g} TB/s of memory, {TRANSFER:.0%} of {links.inside:g} GB/s within a machine and of"
        f" {links.between:g} between machines"
    )
    cache = "the cache of this kind of model is not computed"
    if engine.token is not None:
        cache = (
            f"{engine.token / 1024:.0f} KiB for each token in the cache, room for {engine.samples} samples of"
            f" {config.model.max_length:,} tokens in {engine.share:.0%} of the card"
        )
    typer.echo(f"an engine: {engine.weights / GIB:.1f} GiB of weights on a GPU, {cache}")


def _print_table(tried: dict[str, dict[str, Any]], times: dict[str, StepTime], room: int) -> None:
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


def rehearse_apart(config: TidemillConfig, ranks: int, on_gpu: bool = True) -> dict[str, Any]:
    """Return the StepSize of rank 0 of ``ranks`` as a child process computes it; ConfigError if it cannot be computed.

    on_gpu: see rehearse.
    """
    order = {"config": dump_config(config), "ranks": ranks, "on_gpu": on_gpu}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "deploy.planning.rehearsal"],
            input=json.dumps(order),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"model.path {config.model.path!r}: its step took more than {LIMIT_S:.0f} s to size"
        ) from None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise TidemillError(f"model.path {config.model.path!r} with {ranks} ranks cannot be sized: {reason}")
    answer: dict[str, Any] = json.loads(lines[-1])
    if "error" in answer:
        raise ConfigError(answer["error"])
    return answer


def changes(config: TidemillConfig, ranks: int, shared: bool) -> list[PlanChange]:
    """Return the single settings that are worth trying."""
    trainer = config.trainer
    found = [PlanChange(f"{2 * ranks} ranks", 2 * ranks, {})]
    if trainer.activation_checkpointing in (False, "auto"):
        found.append(PlanChange("trainer.activation_checkpointing=true", ranks, {"activation_checkpointing": True}))
    if (half := trainer.micro_batch_tokens // 2) >= config.model.max_length:
        found.append(PlanChange(f"trainer.micro_batch_tokens={half}", ranks, {"micro_batch_tokens": half}))
    if trainer.lora is None and trainer.parallel.tensor == 1:
        found.append(PlanChange("trainer.lora.rank=16", ranks, {"lora": {"rank": 16}}))
    return [change for change in found if not (shared and change.ranks > ranks)]


def _tried(config: TidemillConfig, ranks: int, shared: bool) -> dict[str, dict[str, Any]]:
    """Return the sizes with one setting changed; one that cannot be computed is left out."""

    def size(change: PlanChange) -> dict[str, Any] | None:
        values = dump_config(config)
        values["trainer"] = {**values.get("trainer", {}), **change.trainer, "processes": 1}
        try:
            return rehearse_apart(parse_config(values), change.ranks)
        except TidemillError:
            return None

    run: Callable[..., Any] = ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1))).map
    tried = changes(config, ranks, shared)
    return {change.text: found for change, found in zip(tried, run(size, tried), strict=True) if found is not None}
