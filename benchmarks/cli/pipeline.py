"""Benchmarks of the pipeline: the broker with and without load, staleness, the control plane."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from benchmarks.cli.options import Json, Url, aof_modes, numbers, show_progress, show_seconds

app = typer.Typer()


@app.command()
def transport(
    tokens: Annotated[str, typer.Option(help="Lengths of the trajectories, tokens.")] = "256,1024,8192",
    aof: Annotated[str, typer.Option(help="Append-only file of the embedded server: off, everysec, always.")] = (
        "off,everysec"
    ),
    trajectories: Annotated[
        int, typer.Option(min=1, help="Trajectories in one round, rounded to whole commits.")
    ] = 5120,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of all pipelines, in turns.")] = 5,
    behind: Annotated[
        int, typer.Option(min=0, help="Instead: throughput after so many trained trajectories, beside a fresh run.")
    ] = 0,
    million: Annotated[bool, typer.Option("--million", help="The same as --behind 1000000.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Trajectories a second through every hop with all guarantees, beside the raw server's limit in the same run."""
    from benchmarks.harness.report import show
    from benchmarks.harness.workload import PipelineShape
    from benchmarks.services.transport import PIPELINES, measure, measure_behind

    lengths, modes = numbers(tokens, "--tokens"), aof_modes(aof, url)
    if million:
        behind = 1_000_000
    with show_progress() as progress:
        if behind:
            bar = progress.add_task("trajectories", total=behind)
            result = measure_behind(
                behind,
                lengths[0],
                modes[0],
                trajectories,
                rounds,
                PipelineShape(),
                url,
                lambda n: progress.advance(bar, n),
            )
        else:
            bar = progress.add_task("rounds", total=len(lengths) * len(modes) * len(PIPELINES) * (rounds + 1))
            rows = []
            for mode in modes:
                for length in lengths:
                    progress.update(bar, description=f"{length} tokens, AOF {mode}")
                    rows.append(
                        measure(
                            length, mode, trajectories, rounds, PipelineShape(), url, lambda n: progress.advance(bar, n)
                        )
                    )
    if behind:
        show("transport-behind", [result], as_json)
    else:
        show("transport", rows, as_json)


@app.command()
def scale(
    generators: Annotated[str, typer.Option(help="How many generators, one row each.")] = "10,100,1000",
    seconds: Annotated[float, typer.Option(min=1, help="Length of each row's run.")] = 60.0,
    median: Annotated[float, typer.Option(min=8, help="Median length of a sample, generated tokens.")] = 400.0,
    sigma: Annotated[float, typer.Option(min=0, help="Spread of the log-normal lengths; 0.8 is a heavy tail.")] = 0.8,
    rate: Annotated[float, typer.Option(min=1, help="Tokens a second that one sample is generated with.")] = 200.0,
    drops: Annotated[
        float, typer.Option(min=0, help="Groups a second that the trainer drops, as those without variance.")
    ] = 0.0,
    aof: Annotated[
        str, typer.Option(help="Append-only file of the embedded server: off, everysec, always.")
    ] = "everysec",
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Simulated generators with heavy-tailed lengths on one server: throughput, broker CPU, admission latency."""
    from benchmarks.harness.report import show
    from benchmarks.services.scale import Lengths, measure

    counts, (mode, *_) = numbers(generators, "--generators"), aof_modes(aof, url)
    rows = []
    with show_progress() as progress:
        for count in counts:
            bar = progress.add_task(f"{count} generators, seconds", total=seconds)
            lengths = Lengths(median=median, sigma=sigma, rate=rate)
            rows.append(measure(count, seconds, mode, lengths, url, partial(show_seconds, progress, bar), drops))
    show("scale", rows, as_json)


@app.command()
def overlap(
    gpus: Annotated[str, typer.Option(help="Sizes of the simulated cluster.")] = "8,32,128",
    staleness: Annotated[str, typer.Option(help="Bounds, in versions; 0 is synchronous.")] = "0,1,2,4,8",
    groups: Annotated[int, typer.Option(min=1, help="Groups of 8 samples in a step, for each GPU.")] = 8,
    measured: Annotated[
        int, typer.Option(min=0, help="Largest cluster that is also run on a real broker; others are simulated only.")
    ] = 32,
    steps: Annotated[int, typer.Option(min=2, help="About so many steps on the broker, after the first ones.")] = 4,
    speedup: Annotated[
        float, typer.Option(min=1, help="How much faster than the real one 8 GPUs are; larger clusters less.")
    ] = 50.0,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """What staleness gains at the lengths of a reasoning run, and the best split of GPUs, on simulated clusters."""
    from benchmarks.harness.report import show
    from benchmarks.services.overlap import SAMPLES, TOKENS, measure, simulate
    from deploy.planning.cluster import ClusterRates, LengthMix

    rates, mix = ClusterRates(), LengthMix()
    sizes, bounds = numbers(gpus, "--gpus"), numbers(staleness, "--staleness", least=0)
    rows = []
    with show_progress() as progress:
        for size in sizes:
            own = speedup * min(1.0, 8 / size)
            for bound in bounds:
                bar = progress.add_task(f"{size} GPUs, staleness {bound}", total=None)
                plan, row = simulate(size, groups, bound, rates, mix)
                if size <= measured:
                    tick = partial(show_seconds, progress, bar)
                    row = measure(row, plan, rates, mix, steps, own, url, tick)
                rows.append(row)
                progress.remove_task(bar)
    fresh = {row["gpus"]: row["tokens_per_s"] for row in rows if row["staleness"] == 0}
    for row in rows:
        against = fresh.get(row["gpus"])
        row.values["times_staleness_0"] = row["tokens_per_s"] / against if against else None
    stated = {"rates": vars(rates), "lengths": vars(mix), "samples": SAMPLES, "tokens_divided_by": TOKENS}
    show("overlap", rows, as_json, **stated)


@app.command()
def control(
    services: Annotated[int, typer.Option(min=1, help="Services that send heartbeats.")] = 200,
    events: Annotated[float, typer.Option(min=1, help="Events a second.")] = 10.0,
    pages: Annotated[int, typer.Option(min=0, help="Open pages: event streams.")] = 20,
    seconds: Annotated[float, typer.Option(min=3, help="How long it is watched.")] = 30.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the pipeline with and without it, in turns.")] = 5,
    trajectories: Annotated[int, typer.Option(min=1, help="Trajectories in one round.")] = 10_240,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """The cost of the control plane: processor, memory, latency, and the pipeline's throughput with and without it."""
    from benchmarks.harness.report import show
    from benchmarks.services.control import measure

    with show_progress() as progress:
        bar = progress.add_task("control plane", total=1 + 2 * rounds)
        row = measure(services, events, pages, seconds, rounds, trajectories, url, lambda n: progress.advance(bar, n))
    show("control", [row], as_json)
