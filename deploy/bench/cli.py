"""The ``tidemill bench`` commands."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

app = typer.Typer(
    name="bench",
    no_args_is_help=True,
)


@app.callback()
def set_up_logs() -> None:
    """Measure the broker, weights on their way, generation, agents, rewards, the control plane, a trainer's step."""
    import structlog

    # Standard output is the result's.
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Url = Annotated[
    str | None, typer.Option(help="Server to measure; an embedded one of its own by default. Its AOF is left as it is.")
]


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
    from deploy.bench import report
    from deploy.bench.transport import PIPELINES, measure, measure_behind
    from deploy.bench.workload import PipelineShape

    lengths, modes = _numbers(tokens, "--tokens"), _modes(aof, url)
    if million:
        behind = 1_000_000
    with _progress() as progress:
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
    if behind and as_json:
        report.print_json("transport-behind", [result])
    elif behind:
        report.print_behind(result)
    elif as_json:
        report.print_json("transport", rows)
    else:
        report.print_transport(rows)


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
    from deploy.bench import report
    from deploy.bench.scale import Lengths, measure

    counts, (mode, *_) = _numbers(generators, "--generators"), _modes(aof, url)
    rows = []
    with _progress() as progress:
        for count in counts:
            bar = progress.add_task(f"{count} generators, seconds", total=seconds)
            lengths = Lengths(median=median, sigma=sigma, rate=rate)
            rows.append(measure(count, seconds, mode, lengths, url, partial(_show, progress, bar), drops))
    if as_json:
        report.print_json("scale", rows)
    else:
        report.print_scale(rows)


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
    from deploy.bench import report
    from deploy.bench.overlap import SAMPLES, TOKENS, measure, simulate
    from deploy.planning.cluster import LengthMix, Rates

    rates, mix = Rates(), LengthMix()
    sizes, bounds = _numbers(gpus, "--gpus"), _numbers(staleness, "--staleness", least=0)
    rows: list[dict[str, Any]] = []
    with _progress() as progress:
        for size in sizes:
            own = speedup * min(1.0, 8 / size)
            for bound in bounds:
                bar = progress.add_task(f"{size} GPUs, staleness {bound}", total=None)
                plan, row = simulate(size, groups, bound, rates, mix)
                if size <= measured:
                    tick = partial(_show, progress, bar)
                    row |= {"speedup": own, **measure(plan, rates, mix, steps, own, url, tick)}
                rows.append(row)
                progress.remove_task(bar)
    for row in rows:
        fresh = [one for one in rows if one["gpus"] == row["gpus"] and one["staleness"] == 0]
        row["times_staleness_0"] = round(row["tokens_per_s"] / fresh[0]["tokens_per_s"], 2) if fresh else None
    if as_json:
        stated = {"rates": vars(rates), "lengths": vars(mix), "samples": SAMPLES, "tokens_divided_by": TOKENS}
        report.print_json("overlap", rows, **stated)
    else:
        report.print_overlap(rows)


@app.command()
def weights(
    models: Annotated[str, typer.Option(help="Sizes of the models: 1M, 50M, 500M.")] = "1M,50M",
    transports: Annotated[str, typer.Option(help="Ways of the weights: file, redis, peer.")] = "file,redis,peer",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of ours and of the plain copy, in turns.")] = 5,
    engine: Annotated[str, typer.Option(help="Engine that loads them: transformers or vllm.")] = "transformers",
    folder: Annotated[Path | None, typer.Option(help="Where files are made; the system's folder for such.")] = None,
    generators: Annotated[
        str | None, typer.Option(help="Instead: so many generators at once, as 1,2,4,8, fetch random bytes.")
    ] = None,
    megabytes: Annotated[int, typer.Option(min=1, help="Size of these.")] = 100,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Weight versions from a trainer's parameters to a generator's engine, beside a plain copy of the same bytes."""
    from deploy.bench import report
    from deploy.bench.weights import measure

    kinds = transports.split(",")
    for kind in kinds:
        if kind not in ("file", "redis", "peer"):
            raise typer.BadParameter(f"{kind!r} is none of file, redis and peer", param_hint="--transports")
    rows = []
    if generators is not None:
        from deploy.bench.weights_spread import measure as measure_spread

        counts = _numbers(generators, "--generators")
        with _progress() as progress:
            bar = progress.add_task(f"{megabytes} MB to generators, rows", total=len(counts) * len(kinds))
            for kind in kinds:
                for count in counts:
                    rows.append(measure_spread(kind, count, megabytes, rounds, url, folder))
                    progress.advance(bar, 1)
        if as_json:
            report.print_json("weights_spread", rows)
        else:
            report.print_spread(rows)
        return
    with _progress() as progress:
        for name in models.split(","):
            for kind in kinds:
                bar = progress.add_task(f"{name} through {kind}, rounds", total=rounds)
                rows.append(measure(name, kind, rounds, engine, url, folder, partial(progress.advance, bar)))
    if as_json:
        report.print_json("weights", rows)
    else:
        report.print_weights(rows)


@app.command()
def generator(
    concurrency: Annotated[int, typer.Option(min=1, help="Samples in flight at once.")] = 64,
    samples: Annotated[int, typer.Option(min=1, help="Samples of one round.")] = 512,
    group: Annotated[int, typer.Option(min=1, help="Samples of one prompt.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Most generated tokens of a sample.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of both, in turns.")] = 5,
    engine: Annotated[str, typer.Option(help="vllm, http-vllm or http-sglang.")] = "vllm",
    server: Annotated[
        str, typer.Option(help="With http: the program that launches it, as generator.http.command.")
    ] = "",
    model: Annotated[
        Path | None, typer.Option(help="Folder of the model; a random one of a million parameters by default.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Type that it computes in.")] = "float32",
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Tokens a second through the generator service, beside its engine, or the engine's server, driven bare."""
    if len(_choices(engine, ("vllm", "http-vllm", "http-sglang"), "--engine")) > 1:
        raise typer.BadParameter("one engine at a time", param_hint="--engine")
    from deploy.bench import report
    from deploy.bench.generator import measure

    with _progress() as progress:
        bar = progress.add_task("rounds", total=rounds + 1)
        command = shlex.split(server) or None
        told = partial(progress.advance, bar)
        row = measure(concurrency, samples, group, tokens, rounds, told, url, engine, command, model, dtype)
    if as_json:
        report.print_json("generator", [row])
    else:
        report.print_generator(row)


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
    from deploy.bench import report
    from deploy.bench.control import measure

    with _progress() as progress:
        bar = progress.add_task("control plane", total=1 + 2 * rounds)
        row = measure(services, events, pages, seconds, rounds, trajectories, url, lambda n: progress.advance(bar, n))
    if as_json:
        report.print_json("control", [row])
    else:
        report.print_control(row)


@app.command()
def trainer(
    samples: Annotated[int, typer.Option(min=8, help="Trajectories in a step, in groups of 8.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each contender, in turns, after a first one.")] = 5,
    micro_batch_tokens: Annotated[int, typer.Option(min=1024, help="Tokens in one forward pass of ours.")] = 4096,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each contender.")] = 2,
    as_json: Json = False,
) -> None:
    """Our optimizer step on a model of 25 M parameters, beside TRL's (where installed) and beside the bare model."""
    from deploy.bench import report
    from deploy.bench.trainer import CONTENDERS, measure

    with _progress() as progress:
        bar = progress.add_task("steps", total=len(CONTENDERS) * (rounds + 1))
        row = measure(samples, rounds, micro_batch_tokens, threads, lambda n: progress.advance(bar, n))
    if as_json:
        report.print_json("trainer", [row], **{key: row[key] for key in report.TRAINER_KEYS})
    else:
        report.print_trainer(row)


@app.command()
def agents(
    parts: Annotated[str, typer.Option(help="What is measured: episodes, endpoint, tokens.")] = (
        "episodes,endpoint,tokens"
    ),
    clients: Annotated[str, typer.Option(help="Clients of the episodes' agents: openai, raw (httpx).")] = "openai,raw",
    episodes: Annotated[int, typer.Option(min=1, help="Episodes at once.")] = 200,
    calls: Annotated[int, typer.Option(min=1, help="Model calls of an episode.")] = 5,
    tool_s: Annotated[float, typer.Option(min=0, help="Seconds that a tool takes between two calls.")] = 2.0,
    call_s: Annotated[float, typer.Option(min=0, help="Seconds that the engine takes for a call.")] = 0.03,
    processes: Annotated[int, typer.Option(min=1, help="Worker processes of the agents.")] = 2,
    requests: Annotated[int, typer.Option(min=1, help="Requests of a round of the endpoint's part.")] = 480,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the endpoint's part, ours and vLLM's in turns.")] = 5,
    as_json: Json = False,
) -> None:
    """Episodes of agents at once, their endpoint beside vLLM's server, and the tokens that they leave to train."""
    from deploy.bench import report

    wanted = _choices(parts, ("episodes", "endpoint", "tokens"), "--parts")
    rows: list[dict[str, Any]] = []
    with _progress() as progress:
        if "episodes" in wanted:
            from deploy.bench.agents.episodes import Shape
            from deploy.bench.agents.episodes import measure as play

            for client in _choices(clients, ("openai", "raw"), "--clients"):
                bar = progress.add_task(f"{episodes} episodes, client {client}", total=1)
                rows.append({"part": "episodes", **play(Shape(episodes, calls, tool_s, call_s), client, processes)})
                progress.advance(bar)
        if "endpoint" in wanted:
            from deploy.bench.agents.endpoint import measure as ask

            bar = progress.add_task("rounds of requests", total=rounds + 1)
            rows.append({"part": "endpoint", **ask(requests, rounds, partial(progress.advance, bar))})
        if "tokens" in wanted:
            from deploy.bench.agents.tokens import CUTS
            from deploy.bench.agents.tokens import measure as count

            rows += [{"part": "tokens", **count(cut=cut)} for cut in CUTS]
    if as_json:
        report.print_json("agents", rows)
    else:
        report.print_agents(rows)


@app.command()
def rewards(
    parts: Annotated[
        str, typer.Option(help="What is measured: code, judge, limit, reward_model.")
    ] = "code,judge,limit,reward_model",
    concurrency: Annotated[str, typer.Option(help="Calls of the judge in flight, one row each.")] = "1,64",
    answer_s: Annotated[float, typer.Option(min=0.01, help="Seconds that an answer of the judge takes.")] = 0.5,
    rate: Annotated[float, typer.Option(min=1, help="Requests a minute of the judge that fails at times.")] = 1200.0,
    samples: Annotated[int, typer.Option(min=20, help="Samples that it judges.")] = 600,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences of a round of the reward model.")] = 256,
    batch: Annotated[int, typer.Option(min=2, help="Most sequences of its batches.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the reward model, in turns.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds for each sandbox and kind of cases.")] = 10.0,
    as_json: Json = False,
) -> None:
    """Programs in each sandbox, a judge's calls beside a server that fails at times, a reward model in batches."""
    from deploy.bench import report

    wanted = _choices(parts, ("code", "judge", "limit", "reward_model"), "--parts")
    rows: list[dict[str, Any]] = []
    with _progress() as progress:
        if "code" in wanted:
            from deploy.bench.rewards.code import KINDS, measure_code, sandboxes

            for sandbox in sandboxes():
                for kind in KINDS:
                    bar = progress.add_task(f"code in {sandbox}, {kind}", total=1)
                    rows.append({"part": "code", **measure_code(sandbox, kind, seconds)})
                    progress.advance(bar)
        if "judge" in wanted:
            from deploy.bench.rewards.judge import measure_in_flight

            for count in _numbers(concurrency, "--concurrency"):
                bar = progress.add_task(f"judge, {count} calls in flight", total=1)
                rows.append({"part": "judge", **measure_in_flight(max(10, 20 * count), count, answer_s)})
                progress.advance(bar)
        if "limit" in wanted:
            from deploy.bench.rewards.judge import measure_limited

            bar = progress.add_task("judge that fails at times", total=1)
            rows.append({"part": "limit", **measure_limited(samples, rate, refuse=0.1, garble=0.05)})
            progress.advance(bar)
        if "reward_model" in wanted:
            from deploy.bench.rewards.model import measure

            progress.add_task("rounds of the reward model", total=None)
            rows.append({"part": "reward_model", **measure(sequences, batch, rounds)})
    if as_json:
        report.print_json("rewards", rows)
    else:
        report.print_rewards(rows)


def _choices(text: str, allowed: Sequence[str], option: str) -> list[str]:
    found = text.split(",")
    for one in found:
        if one not in allowed:
            raise typer.BadParameter(f"{one!r} is not one of {', '.join(allowed)}", param_hint=option)
    return found


def _show(progress: Progress, bar: TaskID, seconds: float) -> None:
    progress.update(bar, completed=int(seconds))


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _numbers(text: str, option: str, least: int = 1) -> list[int]:
    try:
        numbers = [int(part.replace("_", "")) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 256,1024", param_hint=option) from error
    if min(numbers) < least:
        raise typer.BadParameter(f"{text!r} holds a number below {least}", param_hint=option)
    return numbers


def _modes(text: str, url: str | None) -> list[str]:
    from deploy.bench.processes import AOF_MODES

    if url is not None:
        return ["as it is"]
    modes = text.split(",")
    for mode in modes:
        if mode not in AOF_MODES:
            raise typer.BadParameter(f"{mode!r} is not one of {', '.join(AOF_MODES)}", param_hint="--aof")
    return modes
