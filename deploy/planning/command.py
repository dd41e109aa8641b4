"""``tidemill plan``: which split of GPUs, staleness and window to start a configuration from."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from deploy.launchers.gpus import engine_width
from deploy.planning.run_rates import Known, of_run, sampling_at, stated
from deploy.planning.search import Plan, best
from schemas.config import TidemillConfig
from schemas.run_folder import METRICS

STALENESS = (0, 1, 2, 4, 8)
NEARLY = 0.95
"""The least staleness is taken that has this share of the best throughput."""


def plan(
    config: TidemillConfig,
    gpus: int,
    trained: float | None,
    sampled: float | None,
    mean: float | None,
    as_json: bool,
) -> None:
    """Print the plans of each staleness, and the settings of the one to start from, up to the configured staleness.

    trained: tokens a second of one GPU of the trainer; sampled: of a full generator; mean: tokens of an answer. None:
    as the run in the configuration's folder measured them, or else as ClusterRates state them.
    """
    known = figures(config, trained, sampled, mean)
    plans = [make(config, gpus, staleness, known) for staleness in STALENESS]
    chosen = choose([one for one in plans if one.layout.staleness <= config.flow.staleness])
    if as_json:
        found = {
            "rates": vars(known.rates),
            "lengths": vars(known.mix),
            "sources": dict(known.source),
            "plans": [describe(one) for one in plans],
            "start_from": settings(chosen),
        }
        typer.echo(json.dumps(found, indent=2))
        return
    rates, mix = known.rates, known.mix
    typer.echo(f"a GPU of the trainer: {rates.trained_tokens_per_s:,.0f} tokens a second ({known.source['trained']})")
    typer.echo(f"a full generator: {rates.sampled_tokens_per_s():,.0f} tokens a second ({known.source['sampled']})")
    typer.echo(
        f"answers: {mix.mean:,.0f} tokens, sigma {mix.sigma:.2f}, up to {mix.longest:,} ({known.source['lengths']})"
    )
    typer.echo(f"weights reach the generators after {rates.publish_s:.1f} s ({known.source['publishing']})")
    table = Table()
    for column in ("staleness", "generators", "trainer GPUs", "window", "step", "tokens/s", "trainer busy"):
        table.add_column(column, justify="right")
    for one in plans:
        row = describe(one)
        table.add_row(
            str(row["staleness"]),
            str(row["generators"]),
            str(row["trainers"]),
            str(row["window"]),
            f"{row['step_s']:.1f} s",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['trainer_busy']:.0%}",
            style="bold" if one is chosen else None,
        )
    Console().print(table)
    typer.echo("start from: " + " ".join(f"{name}={value}" for name, value in settings(chosen).items()))


def figures(config: TidemillConfig, trained: float | None, sampled: float | None, mean: float | None) -> Known:
    """Collect what the plan is made from: what is given, before what the run measured, before what is stated."""
    known = stated(config.sampling.max_tokens, config.generator.max_samples)
    known = of_run(config.folder / METRICS, known, config.trainer.processes, max(1, config.generator.replicas))
    rates, mix, source = known.rates, known.mix, dict(known.source)
    if trained is not None:
        rates, source["trained"] = replace(rates, trained_tokens_per_s=trained), "given"
    if sampled is not None:
        rates, source["sampled"] = sampling_at(rates, sampled), "given"
    if mean is not None:
        mix, source["lengths"] = replace(mix, mean=mean), "given"
    return Known(rates, mix, source)


def make(config: TidemillConfig, gpus: int, staleness: int, known: Known) -> Plan:
    """Find the best layout at a staleness."""
    return best(
        gpus,
        config.trainer.batch_groups,
        config.sampling.n,
        staleness,
        known.rates,
        known.mix,
        steps=6,
        generator_gpus=engine_width(config),
        trainer_unit=config.trainer.parallel.unit,
    )


def choose(plans: list[Plan]) -> Plan:
    """Choose the least staleness with nearly the best throughput. It is not above the configured one.

    What more staleness costs in quality is not simulated, so the bound is raised by the user only.
    """
    most = max(plan.outcome.tokens_per_s for plan in plans)
    return next(plan for plan in plans if plan.outcome.tokens_per_s >= NEARLY * most)


def describe(plan: Plan) -> dict[str, Any]:
    """Make the row of a plan."""
    layout, outcome = plan.layout, plan.outcome
    return {
        "staleness": layout.staleness,
        "generators": layout.generators,
        "trainers": layout.trainers,
        "window": layout.window,
        "step_s": round(outcome.step_s, 2),
        "tokens_per_s": round(outcome.tokens_per_s, 1),
        "trainer_busy": round(outcome.trainer_busy, 3),
        "generators_busy": round(outcome.generators_busy, 3),
    }


def settings(plan: Plan) -> dict[str, int]:
    """Return the settings of a plan."""
    return {
        "trainer.processes": plan.layout.trainers,
        "generator.replicas": plan.layout.generators,
        "flow.staleness": plan.layout.staleness,
        "flow.window": plan.layout.window,
    }
