"""Commands on the runs of a broker or a folder, on the configuration's JSON schema, and on a broker's users."""

import json
from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.options import AFTER, RUN, SERVICES, WATCH, ConfigFile, Json, Overrides, Prefix, RunOnDisk, Url, load
from schemas.errors import ConfigError

HERE, LOCAL = Path("runs"), "127.0.0.1"

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
    from deploy.checks.names import editor_schema

    print(json.dumps(editor_schema(), indent=2))


@app.command(rich_help_panel=AFTER)
def runs(url: Url = None, as_json: Json = False) -> None:
    """List the runs on a broker and in runs/."""
    from deploy.client import find

    find.show_runs(url, as_json)


@app.command(rich_help_panel=AFTER)
def team(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML list of control planes and brokers.")],
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Serve a page on this port of 127.0.0.1; 0: any free port.")
    ] = None,
    user_header: Annotated[
        str | None, typer.Option(help="Header in which a proxy names the page's user; others are rejected.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the runs of several control planes and brokers: state, owner, devices, waiting, and the last order."""
    from deploy.client.team import serve, show

    if port is None:
        show(file, as_json)
    else:
        serve(file, port, user_header)


@app.command(rich_help_panel=AFTER)
def ui(
    folder: Annotated[
        Path,
        typer.Argument(metavar="[FOLDER]", help="A run's folder, or the folder that contains them; default: runs/."),
    ] = HERE,
    host: Annotated[str, typer.Option(help="Address to listen on; other than loopback, it needs a token.")] = LOCAL,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")] = 8641,
) -> None:
    """Serve the dashboard over runs on disk, finished or running, without a broker."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}: give a run's folder, or the folder that contains them")
    from deploy.control_plane.server import run_files

    run_files(folder, host, port, lambda url: print(f"the runs in {folder} are at {url}", flush=True))


@app.command(rich_help_panel=AFTER)
def purge(
    run: Annotated[str | None, typer.Argument(help="Name of the run, or its YAML configuration.")] = None,
    ended: Annotated[
        float | None, typer.Option(min=0, help="Instead of RUN: all runs that ended so many days ago, or earlier.")
    ] = None,
    url: Url = None,
    prefix: Prefix = "tidemill",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Delete the run even if its services are alive.")] = False,
    files: Annotated[
        bool, typer.Option("--files", help="Delete its folder as well, with checkpoints and models.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Delete all data of a run, or of runs that ended, in the broker; their folders stay without --files."""
    from deploy.client import find

    if as_json and not yes:
        raise ConfigError("--json cannot ask for confirmation: add --yes")
    if (run is None) == (ended is None):
        raise ConfigError("give either RUN or --ended DAYS")
    of_run = None
    if files:
        from deploy.run.folder import ended_folder

        of_run = ended_folder
    if run is None:
        find.purge_ended(url, ended or 0.0, yes, as_json, of_run)
        return
    find.purge(find.find(run, url, prefix, any_schema=True), run, yes, force, as_json, of_run)


@app.command(rich_help_panel=SERVICES)
def acl(
    config: ConfigFile,
    overrides: Overrides = None,
    files: Annotated[Path | None, typer.Option(help="Folder for the roles' URLs and the server's users.")] = None,
    url: Annotated[
        str, typer.Option(help="With --files: URL by which services reach the server.")
    ] = "redis://redis:6379/0",
    as_json: Json = False,
) -> None:
    """Create an ACL user for each role: ACL lines go to stdout and passwords to stderr, or both into files.

    With --json, both go to stdout; with --files, the names of the files.
    """
    from deploy.client.users import print_users, write_users

    loaded = load(config, overrides)
    if files is None:
        print_users(loaded, as_json)
    else:
        write_users(loaded, files, url, as_json)
