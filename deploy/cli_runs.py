"""Commands that look at the runs on a broker and help them by hand: runs, purge, acl, dead-letters, set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()

Run = Annotated[str, typer.Argument(metavar="RUN", help="Name of the run, or its YAML configuration.")]
Url = Annotated[str | None, typer.Option(help="The broker; REDIS_URL, else the embedded one of the run, by default.")]
Prefix = Annotated[str, typer.Option(help="broker.prefix of the run; read from the configuration if that is given.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("set")
def change(
    run: Run,
    settings: Annotated[
        list[str], typer.Argument(metavar="NAME=VALUE...", help="staleness=N, batch=N, or =default for the file's.")
    ],
    url: Url = None,
    prefix: Prefix = "tidemill",
) -> None:
    """Change the staleness bound or the batch of a run while it goes on."""
    from deploy import inspection

    inspection.change(inspection.find(run, url, prefix), settings)


@app.command()
def runs(url: Url = None, as_json: Json = False) -> None:
    """List the runs on a broker with their memory."""
    from deploy import inspection

    inspection.show_runs(url, as_json)


@app.command()
def purge(
    run: Run,
    url: Url = None,
    prefix: Prefix = "tidemill",
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
) -> None:
    """Delete everything a run left in the broker; its folder stays."""
    from deploy import inspection

    inspection.purge(inspection.find(run, url, prefix), run, yes)


@app.command()
def acl(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML configuration.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[a.b=c]...", help="Settings that win.")] = None,
) -> None:
    """Make users for the server, one a role: ACL lines on stdout, their passwords on stderr."""
    from deploy.inspection import print_users
    from schemas.config import load_config

    print_users(load_config(config, overrides or []))


letters = typer.Typer(help="Messages that could not be processed.", no_args_is_help=True)
app.add_typer(letters, name="dead-letters")
Letter = Annotated[str, typer.Argument(metavar="ID", help="Id of the letter, from the list.")]


@letters.command("list")
def list_letters(run: Run, url: Url = None, prefix: Prefix = "tidemill", as_json: Json = False) -> None:
    """List the newest dead letters with their reasons."""
    from deploy import inspection

    inspection.list_letters(inspection.find(run, url, prefix), as_json)


@letters.command()
def show(run: Run, letter: Letter, url: Url = None, prefix: Prefix = "tidemill") -> None:
    """Print one dead letter whole."""
    from deploy import inspection

    inspection.show_letter(inspection.find(run, url, prefix), letter)


@letters.command()
def requeue(run: Run, letter: Letter, url: Url = None, prefix: Prefix = "tidemill") -> None:
    """Admit the prompt group of a dead letter again."""
    from deploy import inspection

    inspection.requeue_letter(inspection.find(run, url, prefix), letter)


@letters.command()
def drop(run: Run, letter: Letter, url: Url = None, prefix: Prefix = "tidemill") -> None:
    """Delete one dead letter."""
    from deploy import inspection

    inspection.find(run, url, prefix).dead_letters.drop(letter)
