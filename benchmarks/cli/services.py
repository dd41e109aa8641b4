"""Benchmarks of what services do: weights on their way, generation, a trainer's step, agents, rewards."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.options import Json, Url, choices, numbers, show_progress

app = typer.Typer()


@app.command()
def weights(
    models: Annotated[str, typer.Option(help="Sizes of the models: 1M, 50M, 500M.")] = "1M,50M",
    transports: Annotated[
        str | None,
        typer.Option(help="Ways of the weights, all by default: file, redis, peer; with --generators, nccl."),
    ] = None,
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
    from benchmarks.harness.report import ResultRow, show
    from benchmarks.weights.model import SHAPES
    from benchmarks.weights.transports import measure

    names = choices(models, tuple(SHAPES), "--models")
    known = ("file", "redis", "peer") if generators is None else ("file", "redis", "peer", "nccl")
    kinds = list(known) if transports is None else choices(transports, known, "--transports")
    rows: list[ResultRow] = []
    if generators is not None:
        from benchmarks.weights.spread import measure as measure_spread

        counts = numbers(generators, "--generators")
        with show_progress() as progress:
            bar = progress.add_task(f"{megabytes} MB to generators, rows", total=len(counts) * len(kinds))
            for kind in kinds:
                for count in counts:
                    rows.append(measure_spread(kind, count, megabytes, rounds, url, folder))
                    progress.advance(bar, 1)
        show("weights_spread", rows, as_json)
        return
    with show_progress() as progress:
        for name in names:
            for kind in kinds:
                bar = progress.add_task(f"{name} through {kind}, rounds", total=rounds)
                rows.append(measure(name, kind, rounds, engine, url, folder, partial(progress.advance, bar)))
    show("weights", rows, as_json)


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
    if len(choices(engine, ("vllm", "http-vllm", "http-sglang"), "--engine")) > 1:
        raise typer.BadParameter("one engine at a time", param_hint="--engine")
    if samples < group:
        raise typer.BadParameter(f"{samples} samples make no group of {group} (--group)", param_hint="--samples")
    from benchmarks.harness.report import show
    from benchmarks.services.generator import measure

    with show_progress() as progress:
        bar = progress.add_task("rounds", total=rounds + 1)
        command = shlex.split(server) or None
        told = partial(progress.advance, bar)
        row = measure(concurrency, samples, group, tokens, rounds, told, url, engine, command, model, dtype)
    show("generator", [row], as_json)


@app.command()
def trainer(
    samples: Annotated[int, typer.Option(min=8, help="Trajectories in a step, in groups of 8.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each contender, in turns, after a first one.")] = 5,
    micro_batch_tokens: Annotated[int, typer.Option(min=1024, help="Tokens in one forward pass of ours.")] = 4096,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each contender.")] = 2,
    compiled: Annotated[bool, typer.Option("--compile", help="Beside ours with compiled layers, too.")] = False,
    as_json: Json = False,
) -> None:
    """Our optimizer step on a model of 25 M parameters, beside TRL's (where installed) and beside the bare model."""
    from benchmarks.harness.report import show
    from benchmarks.services.trainer import contenders, measure

    with show_progress() as progress:
        names = contenders(compiled)
        bar = progress.add_task("steps", total=len(names) * (rounds + 1))
        row = measure(names, samples, rounds, micro_batch_tokens, threads, partial(progress.advance, bar))
    show("trainer", [row], as_json)


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
    from benchmarks.harness.report import ResultRow, show

    wanted = choices(parts, ("episodes", "endpoint", "tokens"), "--parts")
    rows: list[ResultRow] = []
    with show_progress() as progress:
        if "episodes" in wanted:
            from benchmarks.agents.episodes import EpisodeShape
            from benchmarks.agents.episodes import measure as play

            for client in choices(clients, ("openai", "raw"), "--clients"):
                bar = progress.add_task(f"{episodes} episodes, client {client}", total=1)
                rows.append(play(EpisodeShape(episodes, calls, tool_s, call_s), client, processes))
                progress.advance(bar)
        if "endpoint" in wanted:
            from benchmarks.agents.endpoint import measure as ask

            bar = progress.add_task("rounds of requests", total=rounds + 1)
            rows.append(ask(requests, rounds, partial(progress.advance, bar)))
        if "tokens" in wanted:
            from benchmarks.agents.tokens import CUTS
            from benchmarks.agents.tokens import measure as count

            rows += [count(cut=cut) for cut in CUTS]
    show("agents", rows, as_json)


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
    from benchmarks.harness.report import ResultRow, show

    wanted = choices(parts, ("code", "judge", "limit", "reward_model"), "--parts")
    rows: list[ResultRow] = []
    with show_progress() as progress:
        if "code" in wanted:
            from benchmarks.rewards.code import KINDS, measure_code, sandboxes

            for sandbox in sandboxes():
                for kind in KINDS:
                    bar = progress.add_task(f"code in {sandbox}, {kind}", total=1)
                    rows.append(measure_code(sandbox, kind, seconds))
                    progress.advance(bar)
        if "judge" in wanted:
            from benchmarks.rewards.judge import measure_in_flight

            for count in numbers(concurrency, "--concurrency"):
                bar = progress.add_task(f"judge, {count} calls in flight", total=1)
                rows.append(measure_in_flight(max(10, 20 * count), count, answer_s))
                progress.advance(bar)
        if "limit" in wanted:
            from benchmarks.rewards.judge import measure_limited

            bar = progress.add_task("judge that fails at times", total=1)
            rows.append(measure_limited(samples, rate, refuse=0.1, garble=0.05))
            progress.advance(bar)
        if "reward_model" in wanted:
            from benchmarks.rewards.model import measure

            progress.add_task("rounds of the reward model", total=None)
            rows.append(measure(sequences, batch, rounds))
    show("rewards", rows, as_json)
