"""Commands that read what a run left on disk: show, logs, config; and the schema of the configuration, for editors."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.cli.options import AFTER, RUN, WATCH, Json, Overrides, RunOnDisk

app = typer.Typer()


@app.command(rich_help_panel=AFTER)
def show(run: RunOnDisk, as_json: Json = False) -> None:
    """Show how a run went, from its folder: state, evaluations, metrics at first and now, what was changed."""
    from deploy.client.report import show_run

    show_run(run, as_json)


@app.command(rich_help_panel=WATCH)
def logs(
    run: RunOnDisk,
    service: Annotated[str | None, typer.Argument(metavar="[SERVICE]", help="Only this one; else all.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="The newest so many of each service.")] = 50,
    as_json: Json = False,
) -> None:
    """Print the logs of a run's services, from its folder."""
    from deploy.client.report import print_logs

    print_logs(run, service, follow, lines, as_json)


@app.command(rich_help_panel=AFTER)
def config(
    run: RunOnDisk,
    overrides: Overrides = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only what is not the default.")] = False,
    as_json: Json = False,
) -> None:
    """Print the settings in effect, of a run or of a file with overrides; secrets are masked."""
    from deploy.client.report import print_config

    print_config(run, overrides or [], changed, as_json)


@app.command(rich_help_panel=RUN)
def schema() -> None:
    """Print the JSON schema of the configuration, with which editors complete and check it."""
    import json

    from schemas.config import TidemillConfig

    print(json.dumps(TidemillConfig.model_json_schema(), indent=2))
