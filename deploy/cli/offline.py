"""Commands that need no broker.

They make a model (sft, dpo, reward-model) or a configuration (convert, plan), try an agent or a model (agent, eval),
and read what a run left on disk (export, batches, replay).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.options import (
    AFTER,
    RUN,
    ConfigFile,
    Json,
    Overrides,
    RunOnDisk,
    in_ranks,
    load,
    print_json,
    result_alone,
)
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from schemas.config import DpoConfig, RewardModelConfig, TidemillConfig

app = typer.Typer()


@app.command(rich_help_panel=RUN)
def sft(config: ConfigFile, overrides: Overrides = None, as_json: Json = False) -> None:
    """Make the model of warm_start by supervised training, in trainer.processes ranks."""
    loaded = load(config, overrides)
    if loaded.warm_start is None:
        raise ConfigError("the configuration has no warm_start section, there is no model to make")
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
    """Train the model on preferred and rejected answers, in trainer.processes ranks, without a broker."""
    loaded = load(config, overrides)
    if loaded.dpo is None:
        raise ConfigError("the configuration has no dpo section, there is nothing to train on")
    in_ranks(loaded, ["dpo", str(config), *(overrides or [])], as_json)
    _train_on_pairs(loaded, loaded.dpo, as_json)


@app.command("reward-model", rich_help_panel=RUN)
def reward_model(config: ConfigFile, overrides: Overrides = None, as_json: Json = False) -> None:
    """Train a reward model on preferred and rejected answers, in trainer.processes ranks, without a broker."""
    loaded = load(config, overrides)
    if loaded.reward_model is None:
        raise ConfigError("the configuration has no reward_model section, there is nothing to train on")
    in_ranks(loaded, ["reward-model", str(config), *(overrides or [])], as_json)
    _train_on_pairs(loaded, loaded.reward_model, as_json)


def _train_on_pairs(config: TidemillConfig, settings: DpoConfig | RewardModelConfig, as_json: bool) -> None:
    from deploy.offline.preference import make_preference_model

    with result_alone(as_json):
        made = make_preference_model(config, settings)
    if as_json and made is not None:
        print_json(made)


@app.command(rich_help_panel=RUN)
def agent(
    config: ConfigFile,
    overrides: Overrides = None,
    base_url: Annotated[
        str | None,
        typer.Option(
            help="Address of an OpenAI-compatible server, ends with /v1; by default an engine without a model."
        ),
    ] = None,
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Its key.")] = "none",
    example: Annotated[int, typer.Option(min=0, help="Position of the training example that it gets.")] = 0,
    as_json: Json = False,
) -> None:
    """Run the agent of the configuration once, against any server, and show what came of it: for debugging."""
    loaded = load(config, overrides)
    from deploy.run.agent_command import run_agent

    run_agent(loaded, base_url, api_key, example, as_json)


@app.command(rich_help_panel=RUN)
def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A script or YAML file of TRL or verl.")],
    system: Annotated[
        str | None, typer.Option("--from", help="trl or verl; by default what the file looks like.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="GPUs that trained there, over which it is sharded.")] = 1,
    out: Annotated[Path | None, typer.Option(help="File to write, a new one; by default it is printed.")] = None,
    as_json: Json = False,
) -> None:
    """Make a configuration of one for TRL's GRPO trainer or verl, and name what has no counterpart."""
    from deploy.migrate.convert import convert_file, render

    name, done = convert_file(file, system, processes)
    text = render(file, name, done)
    if out is not None:
        if out.exists():
            raise ConfigError(f"{out} exists: name a new file with --out")
        out.write_text(text, encoding="utf-8")
    if as_json:
        print_json(
            {"from": name, "config": done.config, "notes": done.notes(), "out": None if out is None else str(out)}
        )
    elif out is None:
        typer.echo(text, nl=False)
    else:
        typer.echo(f"{out}: see the {len(done.notes())} notes at its head, then try: tidemill doctor {out}")


@app.command(rich_help_panel=RUN)
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    gpus: Annotated[int, typer.Option(min=2, max=1024, help="GPUs for the trainer and the generators together.")] = 8,
    trained: Annotated[
        float | None,
        typer.Option("--trained-tokens-per-s", min=1e-3, help="Of one GPU of the trainer; by default as measured."),
    ] = None,
    sampled: Annotated[
        float | None,
        typer.Option("--sampled-tokens-per-s", min=1e-3, help="Of a generator that is full; by default as measured."),
    ] = None,
    mean: Annotated[
        float | None, typer.Option("--mean-length", min=1, help="Tokens of an answer; by default as measured.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Simulate splits of GPUs and bounds of staleness, and say which to start from; best after a first short run."""
    from deploy.planning.command import plan as make_plan

    make_plan(load(config, overrides), gpus, trained, sampled, mean, as_json)


@app.command("eval", rich_help_panel=AFTER)
def evaluate(
    config: ConfigFile,
    overrides: Overrides = None,
    model: Annotated[Path | None, typer.Option(help="Folder of the model; model.path by default.")] = None,
    as_json: Json = False,
) -> None:
    """Answer the held-out prompts with a model, without a broker, and print its accuracy."""
    loaded = load(config, overrides)
    if loaded.eval is None:
        raise ConfigError("the configuration has no eval section, there are no held-out prompts")
    from deploy.checks.model_files import check_made
    from deploy.offline.evaluate import evaluate_model

    if model is None:
        check_made(loaded)
    evaluate_model(loaded, loaded.eval, model, as_json)


@app.command(rich_help_panel=AFTER)
def export(
    run: RunOnDisk,
    step: Annotated[int | None, typer.Option(help="The checkpoint of this step; the newest whole one.")] = None,
    to: Annotated[Path | None, typer.Option(help="A new folder; exports/CHECKPOINT in the run's folder.")] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Only the adapter of trainer.lora, for peft.")] = False,
    push: Annotated[
        str | None, typer.Option(metavar="REPOSITORY", help="Upload it to the Hugging Face hub as well: me/my-model.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push: a new repository is private.")] = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint as a Hugging Face model with its tokenizer and a model card, for transformers and vLLM."""
    from schemas.run_folder import config_of

    config = config_of(run)
    from deploy.export.checkpoints import export_model

    export_model(config, step, to, adapter, push, private, as_json)


@app.command(rich_help_panel=AFTER)
def batches(
    run: RunOnDisk,
    step: Annotated[int | None, typer.Option(min=0, help="The samples of this step; by default a line a step.")] = None,
    as_json: Json = False,
) -> None:
    """List what the recorded batches of a run hold; with --json a line each, of samples with their tokens."""
    from schemas.run_folder import config_of

    config = config_of(run)
    from deploy.export.batches import print_batches

    print_batches(config, step, as_json)


@app.command(rich_help_panel=AFTER)
def replay(
    run: RunOnDisk,
    first: Annotated[int, typer.Option("--from", help="A checkpoint's step; 0 is where the run began.")],
    last: Annotated[int | None, typer.Option("--to", help="A later checkpoint's step; the newest whole one.")] = None,
    as_json: Json = False,
) -> None:
    """Train recorded steps again without a broker; exit with 0 if the weights are equal to the bit, with 1 if not."""
    from schemas.run_folder import config_of

    config = config_of(run)
    from deploy.export.checkpoints import replay_steps

    raise typer.Exit(replay_steps(config, run, first, last, as_json))
