"""Commands that need no broker: they train or try a model, make a configuration, or read a run's folder."""

from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.cli.options import (
    AFTER,
    RUN,
    CheckpointStep,
    ConfigFile,
    Json,
    Overrides,
    RunOnDisk,
    in_ranks,
    load,
    print_json,
    result_alone,
)
from schemas.errors import NOT_DONE_EXIT, ConfigError
from schemas.run_folder import config_of

app = typer.Typer()


@app.command(rich_help_panel=RUN)
def sft(config: ConfigFile, overrides: Overrides = None, as_json: Json = False) -> None:
    """Train the warm_start model by supervised fine-tuning, in trainer.processes ranks."""
    loaded = load(config, overrides)
    if loaded.warm_start is None:
        raise ConfigError("the configuration has no warm_start section: add one to train a model")
    from deploy.offline.warm_start import make_model, up_to_date
    from deploy.services.torchrun import is_rank

    if loaded.trainer.processes == 1 or is_rank() or not up_to_date(loaded, loaded.warm_start):
        in_ranks(loaded, ["sft", str(config), *(overrides or [])], as_json)
    with result_alone(as_json):
        made = make_model(loaded, loaded.warm_start)
    if as_json and made is not None:
        print_json(made)


@app.command(rich_help_panel=RUN)
def dpo(config: ConfigFile, overrides: Overrides = None, as_json: Json = False) -> None:
    """Train a model by DPO on preferred and rejected answers, in trainer.processes ranks."""
    _train_on_pairs("dpo", config, overrides, as_json)


@app.command("reward-model", rich_help_panel=RUN)
def reward_model(config: ConfigFile, overrides: Overrides = None, as_json: Json = False) -> None:
    """Train a reward model on preferred and rejected answers, in trainer.processes ranks."""
    _train_on_pairs("reward-model", config, overrides, as_json)


def _train_on_pairs(command: str, config: Path, overrides: list[str] | None, as_json: bool) -> None:
    loaded = load(config, overrides)
    settings = loaded.dpo if command == "dpo" else loaded.reward_model
    if settings is None:
        raise ConfigError(f"the configuration has no {command.replace('-', '_')} section: add one with a dataset")
    in_ranks(loaded, [command, str(config), *(overrides or [])], as_json)
    from deploy.offline.preference import make_preference_model

    with result_alone(as_json):
        made = make_preference_model(loaded, settings)
    if as_json and made is not None:
        print_json(made)


@app.command(rich_help_panel=RUN)
def agent(
    config: ConfigFile,
    overrides: Overrides = None,
    base_url: Annotated[
        str | None,
        typer.Option(help="URL of an OpenAI-compatible server, ending in /v1; default: an engine without a model."),
    ] = None,
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="API key of the server.")] = "none",
    example: Annotated[int, typer.Option(min=0, help="Index of the training example for the agent.")] = 0,
    answers: Annotated[
        Path | None,
        typer.Option(help="File of the policy's answers to the agent's calls, one JSON string a line, tool calls too."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the configured agent once against any server and print the result (for debugging)."""
    loaded = load(config, overrides)
    from deploy.checks.agent_episode import run_agent

    run_agent(loaded, base_url, api_key, example, answers, as_json)


@app.command(rich_help_panel=RUN)
def convert(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="A script or file of settings of TRL, verl, AReaL, RLinf or prime-rl; of several, later ones count.",
        ),
    ],
    system: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="verl, verl-sft, trl, trl-dpo, trl-sft, areal, rlinf, rlinf_control, prime_rl; default: detect.",
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Processes that trained there; default: as the file tells. The trainer has as many."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="New file for the configuration; default: print it.")] = None,
    as_json: Json = False,
) -> None:
    """Convert a configuration of TRL, verl, AReaL, RLinf or prime-rl, and list what has no counterpart.

    Exit code 4 if something is left to fill in, which the first line names.
    """
    from deploy.migrate.convert import convert_file, render
    from deploy.migrate.trl_script import move_functions

    name, done = convert_file(*files, system=system, processes=processes)
    file, missing = files[0], done.missing()
    written: list[Path] = []
    if out is not None:
        if out.exists():
            raise ConfigError(f"--out {out} exists: name a new file")
        written = move_functions(file, done, out.parent) if file.suffix == ".py" else []
        out.write_text(render(file, name, done), encoding="utf-8")
    if as_json:
        shown = {"from": name, "config": done.config, "missing": missing, "notes": done.notes()}
        print_json({**shown, "out": None if out is None else str(out)})
    elif out is None:
        typer.echo(render(file, name, done), nl=False)
    else:
        for moved in written:
            typer.echo(f"{moved}: holds what {file.name} gives its trainer")
        left = f"fill in {', '.join(missing)}, " if missing else ""
        typer.echo(f"{out}: {left}see the {len(done.notes())} notes at its head, then try: tidemill doctor {out}")
    if missing:
        raise typer.Exit(NOT_DONE_EXIT)


@app.command(rich_help_panel=RUN)
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    gpus: Annotated[int, typer.Option(min=1, max=1024, help="GPUs for the trainer and the generators together.")] = 8,
    gpu: Annotated[
        str | None,
        typer.Option(help="Compute whether the training fits the memory of this card, for example h200, and rates."),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(help="With --gpu: links within a machine and between machines, by default nvlink,ib400."),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="With --gpu: compute every layout of the trainer's ranks.")
    ] = False,
    image: Annotated[
        Path | None, typer.Option(help="With --gpu: write a picture of the memory here, a PNG; needs matplotlib.")
    ] = None,
    trained: Annotated[
        float | None,
        typer.Option("--trained-tokens-per-s", min=1e-3, help="Speed of one trainer GPU; default: as measured."),
    ] = None,
    sampled: Annotated[
        float | None,
        typer.Option(
            "--sampled-tokens-per-s", min=1e-3, help="Speed of a fully loaded generator; default: as measured."
        ),
    ] = None,
    mean: Annotated[
        float | None, typer.Option("--mean-length", min=1, help="Mean tokens of an answer; default: as measured.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Simulate GPU splits and staleness bounds, and recommend one. Most accurate after a short first run.

    With --gpu: also whether the training fits, computed without weights and without a GPU. The split then has the
    computed rates where the run has not measured any.
    """
    loaded, answer, computed = load(config, overrides), dict[str, Any](), None
    if gpu is not None:
        from deploy.planning.fit import as_json as to_json
        from deploy.planning.fit import fit

        found = fit(loaded, gpus, gpu, link, search, quiet=as_json)
        answer, computed = to_json(found), found.rates
        if image is not None:
            from deploy.export.plot import plot_memory

            plot_memory(found, f"{loaded.model.path}, trainer on {found.ranks} of {gpus} {gpu.upper()}", image)
    from deploy.planning.cluster import engine_width

    # Fewer cannot be split.
    if gpu is None or gpus >= loaded.trainer.parallel.unit + engine_width(loaded):
        from deploy.planning.command import plan as make_plan

        answer |= make_plan(loaded, gpus, trained, sampled, mean, as_json, computed)
    if as_json:
        print_json(answer)


@app.command("eval", rich_help_panel=AFTER)
def evaluate(
    config: ConfigFile,
    overrides: Overrides = None,
    model: Annotated[Path | None, typer.Option(help="Folder of the model; default: model.path.")] = None,
    against: Annotated[
        Path | None, typer.Option(help="Folder of another model, to compare with by prompts: wins and Elo.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Evaluate a model on the held-out prompts without a broker, and print its mean reward."""
    loaded = load(config, overrides)
    if loaded.eval is None:
        raise ConfigError("the configuration has no eval section: add one with held-out prompts")
    from deploy.checks.model_files import check_made
    from deploy.offline.evaluate import evaluate_model

    if model is None:
        check_made(loaded)
    evaluate_model(loaded, loaded.eval, model, against, as_json)


@app.command(rich_help_panel=AFTER)
def export(
    run: RunOnDisk,
    step: CheckpointStep = None,
    to: Annotated[
        Path | None, typer.Option(help="New folder; default: exports/CHECKPOINT in the run's folder.")
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Export only the LoRA adapter, for peft.")] = False,
    push: Annotated[
        str | None,
        typer.Option(metavar="REPOSITORY", help="Also upload it to this repository on the Hugging Face hub."),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push: make a new repository private.")] = False,
    as_json: Json = False,
) -> None:
    """Export a checkpoint as a Hugging Face model with tokenizer and model card, for transformers and vLLM."""
    config = config_of(run)
    from deploy.export.checkpoints import export_model

    export_model(config, step, to, adapter, push, private, as_json)


@app.command(rich_help_panel=AFTER)
def serve(
    model: Annotated[
        str,
        typer.Argument(metavar="RUN|CHECKPOINT|MODEL", help="A run, a checkpoint's folder, or the folder of a model."),
    ],
    step: CheckpointStep = None,
    address: Annotated[str, typer.Option(help="HOST:PORT to listen at.")] = "127.0.0.1:8000",
    api_key: Annotated[
        str | None,
        typer.Option(envvar="TIDEMILL_SERVE_KEY", help="Key that clients must send; default: none is needed."),
    ] = None,
    engine: Annotated[str | None, typer.Option(help="Engine; default: generator.engine.")] = None,
    max_length: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of prompt and answer together; default: model.max_length, or 2048."),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Serve each version of the weights as the run publishes it.")
    ] = False,
) -> None:
    """Serve a model to clients of OpenAI's and Anthropic's protocols, until Ctrl-C."""
    from deploy.offline.serve import find_served
    from deploy.offline.serve import serve as serve_model

    config, folder = find_served(model, step, max_length, engine, live)
    serve_model(config, folder, address, api_key, live)


@app.command(rich_help_panel=AFTER)
def batches(
    run: RunOnDisk,
    step: Annotated[
        int | None, typer.Option(min=0, help="Print the samples of this step; default: a line per step.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the recorded batches of a run; with --json one object a line, samples with their tokens."""
    config = config_of(run)
    from deploy.export.batches import print_batches

    print_batches(config, step, as_json)


@app.command(rich_help_panel=AFTER)
def play(
    run: RunOnDisk,
    step: CheckpointStep = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the episode; default: the evaluation's first.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Most steps of the episode.")] = 1000,
    to: Annotated[Path | None, typer.Option(help="File for the GIF; default: one in the run's folder.")] = None,
    as_json: Json = False,
) -> None:
    """Play an episode of a policy that acts in an environment with numbers, and write it as a GIF."""
    config = config_of(run)
    from deploy.offline.play import play as play_episode

    found = play_episode(config, step, seed, steps, to)
    if as_json:
        print_json(found)
    else:
        played = f"{found['environment']}, seed {found['seed']}: return {found['return']:g} in {found['steps']} steps"
        print(f"{played}, {found['end']} ({found['checkpoint']}): {found['file']}")


@app.command(rich_help_panel=AFTER)
def replay(
    run: RunOnDisk,
    first: Annotated[int, typer.Option("--from", help="Step of a checkpoint; 0: the run's initial model.")],
    last: Annotated[
        int | None, typer.Option("--to", help="Step of a later checkpoint; default: the newest complete one.")
    ] = None,
    rollouts: Annotated[
        bool, typer.Option("--rollouts", help="Generate their samples again, too; requires generator.exact.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train recorded steps again without a broker; exit code 0 if the weights are bit-identical, else 1."""
    config = config_of(run)
    from deploy.export.checkpoints import replay_steps

    raise typer.Exit(replay_steps(config, run, first, last, as_json, rollouts))
