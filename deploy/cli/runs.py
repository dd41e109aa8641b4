"""Commands that look at the runs on a broker: runs, purge, acl."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()

Run = Annotated[str, typer.Argument(metavar="RUN", help="Name of the run, or its YAML configuration.")]
Url = Annotated[str | None, typer.Option(help="The broker; REDIS_URL, else the embedded one of the run, by default.")]
Prefix = Annotated[str, typer.Option(help="broker.prefix of the run; read from the configuration if that is given.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def runs(url: Url = None, as_json: Json = False) -> None:
    """List the runs on a broker with their memory."""
    from deploy.client import find

    find.show_runs(url, as_json)


@app.command()
def purge(
    run: Run,
    url: Url = None,
    prefix: Prefix = "tidemill",
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
) -> None:
    """Delete everything a run left in the broker; its folder stays."""
    from deploy.client import find

    find.purge(find.find(run, url, prefix), run, yes)


@app.command()
def acl(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML configuration.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[a.b=c]...", help="Settings that win.")] = None,
) -> None:
    """Make users for the server, one a role: ACL lines on stdout, their passwords on stderr."""
    from deploy.client.find import print_users
    from schemas.config import load_config

    print_users(load_config(config, overrides or []))
