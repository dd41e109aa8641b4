"""Commands that read a run's folder: show, logs, config; and schema, the configuration's JSON schema for editors."""

from typing import Annotated

import typer

from deploy.cli.options import AFTER, RUN, WATCH, Json, Overrides, RunOnDisk

app = typer.Typer()


@app.command(rich_help_panel=AFTER)
def show(run: RunOnDisk, as_json: Json = False) -> None:
    """Show a report of a run from its folder: state, evaluations, first and last metrics, changed settings."""
    from deploy.client.report import show_run

    show_run(run, as_json)


@app.command(rich_help_panel=WATCH)
def logs(
    run: RunOnDisk,
    service: Annotated[str | None, typer.Argument(metavar="[SERVICE]", help="Only this service; default: all.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Number of newest lines of each service.")] = 50,
    as_json: Json = False,
) -> None:
    """Print the logs of a run's services from its folder."""
    from deploy.client.report import print_logs

    print_logs(run, service, follow, lines, as_json)


@app.command(rich_help_panel=AFTER)
def config(
    run: RunOnDisk,
    overrides: Overrides = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only settings that differ from the default.")] = False,
    as_json: Json = False,
) -> None:
    """Print the settings in effect of a run, or of a file with overrides. Secrets are masked."""
    from deploy.client.report import print_config

    print_config(run, overrides or [], changed, as_json)


@app.command(rich_help_panel=RUN)
def schema() -> None:
    """Print the JSON schema of the configuration, for completion and checks in editors."""
    import json

    from deploy.checks.names import editor_schema

    print(json.dumps(editor_schema(), indent=2))
