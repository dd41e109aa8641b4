"""``tidemill plan``: which split of GPUs, staleness and window to start a configuration from."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from deploy.planning.cluster import engine_width
from deploy.planning.run_rates import Known, count_sharing, figures
from deploy.planning.search import (
    NEARLY,
    STEPS,
    WORTH,
    Plan,
    best,
    best_in_turns,
    in_turns,
    in_words,
    pool_parts,
    simulate,
)
from schemas.config import TidemillConfig
from schemas.config.deploy import parse_ranges

STALENESS = (0, 1, 2, 4, 8)


def plan(
    config: TidemillConfig,
    gpus: int,
    trained: float | None,
    sampled: float | None,
    mean: float | None,
    as_json: bool,
    computed: tuple[float, float | None] | None = None,
) -> dict[str, Any]:
    """Print the plans of each staleness, and the settings of the one to start from, up to the configured staleness.

    trained: tokens a second of one GPU of the trainer; sampled: of a full generator; mean: tokens of an answer. For
    None, and for ``computed``, see figures. as_json: print nothing, and return all of it.
    """
    known = figures(config, trained, sampled, mean, computed=computed)
    plans = [make(config, gpus, staleness, known) for staleness in STALENESS]
    chosen = choose([one for one in plans if one.layout.staleness <= config.flow.staleness])
    compared = compare(config, known, chosen)
    if as_json:
        return {
            "rates": vars(known.rates),
            "pools": {name: vars(rates) for name, rates in known.pools.items()},
            "lengths": vars(known.mix),
            "sources": dict(known.source),
            "plans": [describe(one) for one in plans],
            "start_from": settings(chosen, config.pools),
            **{name: {**describe(one), "shared": one.layout.shared} for name, one in compared.items()},
        }
    rates, mix = known.rates, known.mix
    typer.echo(f"a GPU of the trainer: {rates.trained_tokens_per_s:,.0f} tokens a second ({known.source['trained']})")
    for name, each in (known.pools or {"": rates}).items():
        source = known.source[f"pool {name}" if name else "sampled"]
        whose = f" of pool {name}" if name else ""
        typer.echo(f"a full generator{whose}: {each.sampled_tokens_per_s():,.0f} tokens a second ({source})")
    typer.echo(
        f"answers: {mix.mean:,.0f} tokens, sigma {mix.sigma:.2f}, up to {mix.longest:,} ({known.source['lengths']})"
    )
    typer.echo(f"weights reach the generators after {rates.publish_s:.1f} s ({known.source['publishing']})")
    table = Table()
    for column in ("staleness", "generators", "trainer GPUs", "window", "step", "tokens/s", "trainer busy"):
        table.add_column(column, justify="right")
    for one in plans:
        row = describe(one)
        generators = ", ".join(f"{count} {name}" for name, count in row["pools"].items()) or row["generators"]
        counts = (row["staleness"], generators, row["trainers"], row["window"])
        speed = f"{row['step_s']:.1f} s", f"{row['tokens_per_s']:,.0f}", f"{row['trainer_busy']:.0%}"
        table.add_row(*map(str, counts), *speed, style="bold" if one is chosen else None)
    Console().print(table)
    typer.echo("start from: " + " ".join(f"{name}={value}" for name, value in settings(chosen, config.pools).items()))
    for text in advise(compared, chosen, known):
        typer.echo(text)
    return {}


def make(config: TidemillConfig, gpus: int, staleness: int, known: Known) -> Plan:
    """Return the best plan for so many GPUs at this staleness."""
    return best(
        gpus,
        config.trainer.batch_groups,
        config.sampling.n,
        staleness,
        known.rates,
        known.mix,
        steps=STEPS,
        generator_gpus=engine_width(config),
        trainer_unit=config.trainer.parallel.unit,
        pools=pool_parts(config, gpus, known),
    )


def compare(config: TidemillConfig, known: Known, chosen: Plan) -> dict[str, Plan]:
    """Simulate ``turns``, the best of generators on the trainer's GPUs, and what ``placement`` names, if it is set.

    That is ``placement``, beside ``best_split`` of its GPUs at the configured staleness, and ``placement_in_turns``
    with generators on all of its trainer's GPUs. With pools there is also ``strict_order``, with ``flow.window: 1``.
    """
    rates, mix, unit = known.rates, known.mix, config.trainer.parallel.unit
    pools = pool_parts(config, None, known)
    found = {"turns": best_in_turns(chosen, rates, mix, unit, STEPS, pools)}
    if config.pools:
        found["strict_order"] = simulate(replace(chosen.layout, window=1), rates, mix, STEPS)
    if (placement := config.placement) is None or placement.is_auto:
        return found
    sharing = count_sharing(config)
    layout = replace(
        chosen.layout,
        generators=0 if config.pools else len(placement.engines(engine_width(config))),
        trainers=len(parse_ranges(placement.trainer)),
        staleness=config.flow.staleness,
        window=config.flow.window,
        shared=sum(sharing.values()),
    )
    if config.pools:
        layout = layout.with_pools(
            replace(one, generators=count, shared=shared)
            for one in pools
            for shared, count in ((True, sharing[one.name]), (False, one.generators - sharing[one.name]))
        )
    found["placement"] = simulate(layout, rates, mix, STEPS)
    if layout.gpus > 1:
        found["best_split"] = make(config, layout.gpus, layout.staleness, known)
    if not layout.shared:
        found["placement_in_turns"] = in_turns(found["placement"], layout.trainers, rates, mix, STEPS, pools)
    return found


def advise(compared: Mapping[str, Plan], chosen: Plan, known: Known) -> Iterator[str]:
    """Say what the placement gives beside the best split, and whether turns are worth it."""
    speed = {name: plan.outcome.tokens_per_s for name, plan in compared.items()}
    if (placed := compared.get("placement")) is not None:
        text = f"placement: {in_words(placed)}: {speed['placement']:,.0f} tokens/s"
        if (split := compared.get("best_split")) is not None:
            text += (
                f", {speed['placement'] / speed['best_split']:.2f} of the best split of these GPUs at its staleness"
                f" ({in_words(split)}, window {split.layout.window}: {speed['best_split']:,.0f})"
            )
        if "placement_in_turns" in speed:
            gain = speed["placement_in_turns"] / speed["placement"]
            text += f"; with generators on all of the trainer's GPUs, too, {gain:.2f} times as fast"
        yield text
    if (strict := compared.get("strict_order")) is not None and chosen.layout.window > strict.layout.window:
        share = speed["strict_order"] / chosen.outcome.tokens_per_s
        yield f"flow.window=1 gives {share:.2f} of that: a slow generator delays all who wait for its group"
    turns, gain = compared["turns"], speed["turns"] / chosen.outcome.tokens_per_s
    worth = (
        f"{gain:.2f} times this split: {in_words(turns)}"
        if gain >= WORTH
        else f"not worth it, {gain:.2f} times this split"
    )
    both = known.rates.hold_s + known.rates.give_s
    yield f"turns on shared GPUs, {both:.1f} s for each there and back ({known.source['turns']}): {worth}"


def choose(plans: list[Plan]) -> Plan:
    """Choose the least staleness with nearly the best throughput: its cost in quality is not simulated."""
    most = max(plan.outcome.tokens_per_s for plan in plans)
    return next(plan for plan in plans if plan.outcome.tokens_per_s >= NEARLY * most)


def describe(plan: Plan) -> dict[str, Any]:
    """Return a plan and its simulated outcome as plain data for JSON."""
    layout, outcome = plan.layout, plan.outcome
    return {
        "staleness": layout.staleness,
        "generators": layout.generators,
        "pools": layout.by_pool,
        "trainers": layout.trainers,
        "window": layout.window,
        "step_s": round(outcome.step_s, 2),
        "tokens_per_s": round(outcome.tokens_per_s, 1),
        "trainer_busy": round(outcome.trainer_busy, 3),
        "generators_busy": round(outcome.generators_busy, 3),
    }


def settings(plan: Plan, pools: Iterable[str] = ()) -> dict[str, int]:
    """Return the settings of a plan. pools: of the run, those that the plan leaves out included."""
    given = plan.layout.by_pool
    replicas = {f"pools.{name}.generator.replicas": given.get(name, 0) for name in pools}
    return {
        "trainer.processes": plan.layout.trainers,
        **(replicas or {"generator.replicas": plan.layout.generators}),
        "flow.staleness": plan.layout.staleness,
        "flow.window": plan.layout.window,
    }
