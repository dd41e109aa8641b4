"""Commands over the control plane, or straight from the broker: dead-letters and trajectories.

Exit codes: 0 done, 5 refused with the reason, 1 nobody answers.
"""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from deploy.cli.options import WATCH, Control, Json, Prefix, Run, Url

app = typer.Typer()
letters = typer.Typer(help="Messages that could not be processed.", no_args_is_help=True)
app.add_typer(letters, name="dead-letters", rich_help_panel=WATCH)
found = typer.Typer(help="What the model said: search, and read one in full.", no_args_is_help=True)
app.add_typer(found, name="trajectories", rich_help_panel=WATCH)

Letter = Annotated[str, typer.Argument(metavar="ID", help="Id of the letter, from the list.")]


@letters.command("list")
def list_letters(
    run: Run,
    control: Control = None,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 100,
    url: Url = None,
    prefix: Prefix = "tidemill",
    as_json: Json = False,
) -> None:
    """List the newest dead letters with their reasons, newest first."""
    from deploy.client import run_commands
    from deploy.client.client import open_source

    run_commands.print_letters(open_source(run, control, url, prefix).letters(limit), as_json)


@letters.command()
def show(
    run: Run,
    letter: Letter,
    control: Control = None,
    url: Url = None,
    prefix: Prefix = "tidemill",
    as_json: Json = False,
) -> None:
    """Print one dead letter whole: indented, or with --json on one line."""
    from deploy.client.client import open_source

    found = open_source(run, control, url, prefix).letter(letter)
    print(found.model_dump_json(indent=None if as_json else 2))


@letters.command()
def requeue(
    run: Run,
    letter: Letter,
    control: Control = None,
    url: Url = None,
    prefix: Prefix = "tidemill",
    as_json: Json = False,
) -> None:
    """Admit the prompt group of a dead letter again, before all others."""
    from deploy.client import run_commands
    from deploy.client.client import open_source

    run_commands.print_accepted(open_source(run, control, url, prefix).requeue(letter), as_json)


@letters.command()
def drop(
    run: Run,
    letter: Letter,
    control: Control = None,
    url: Url = None,
    prefix: Prefix = "tidemill",
    as_json: Json = False,
) -> None:
    """Delete one dead letter."""
    from deploy.client import run_commands
    from deploy.client.client import open_source

    run_commands.print_accepted(open_source(run, control, url, prefix).drop(letter), as_json)


@found.command("list")
def list_trajectories(
    run: Run,
    control: Control = None,
    task: Annotated[int | None, typer.Option(min=0, help="Only of this task.")] = None,
    version: Annotated[int | None, typer.Option(min=0, help="Only with tokens of this weight version.")] = None,
    finish: Annotated[
        Literal["stop", "length", "abort", "calls", "deadline"] | None, typer.Option(help="Only with this end.")
    ] = None,
    state: Annotated[Literal["generated", "scored", "trained"] | None, typer.Option(help="Only in this state.")] = None,
    kind: Annotated[Literal["train", "eval"] | None, typer.Option(help="Only of this kind.")] = None,
    reward_min: Annotated[float | None, typer.Option(help="Only with this reward or more.")] = None,
    reward_max: Annotated[float | None, typer.Option(help="Only with this reward or less.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200)] = 20,
    url: Url = None,
    prefix: Prefix = "tidemill",
    as_json: Json = False,
) -> None:
    """List trajectories in the pipeline and recently trained ones, newest first."""
    from deploy.client import run_commands
    from deploy.client.client import open_source

    wanted = {
        "task_id": task,
        "version": version,
        "finish": finish,
        "state": state,
        "kind": kind,
        "reward_min": reward_min,
        "reward_max": reward_max,
        "limit": limit,
    }
    run_commands.print_trajectories(open_source(run, control, url, prefix).trajectories(wanted), as_json)


@found.command("show")
def show_trajectory(
    run: Run,
    task: Annotated[int, typer.Argument(help="Its task.")],
    sample: Annotated[int, typer.Argument(help="Its sample index.")] = 0,
    control: Control = None,
    url: Url = None,
    prefix: Prefix = "tidemill",
    as_json: Json = False,
) -> None:
    """Print one trajectory with what is known of each token."""
    from deploy.client import run_commands
    from deploy.client.client import open_source

    run_commands.print_trajectory(open_source(run, control, url, prefix).trajectory(task, sample), as_json)
