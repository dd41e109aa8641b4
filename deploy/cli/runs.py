"""Commands over the runs of a broker or a folder: runs, ui, purge; and acl, which makes a broker's users."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.options import AFTER, SERVICES, ConfigFile, Json, Overrides, Prefix, Run, Url, load
from schemas.errors import ConfigError

HERE, LOCAL = Path("runs"), "127.0.0.1"

app = typer.Typer()


@app.command(rich_help_panel=AFTER)
def runs(url: Url = None, as_json: Json = False) -> None:
    """List the runs on a broker, and those whose folders lie under runs/."""
    from deploy.client import find

    find.show_runs(url, as_json)


@app.command(rich_help_panel=AFTER)
def ui(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="Folder with the folders of runs, or a run's; runs/ by default.")
    ] = HERE,
    host: Annotated[str, typer.Option(help="Address to listen on; beyond this machine a token is needed.")] = LOCAL,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8641,
) -> None:
    """Show the dashboard over runs on disk, finished or running, without a broker: compare them, read samples."""
    if not folder.is_dir():
        raise ConfigError(f"no folder {folder}: give the one with the folders of runs, or that of a run")
    from deploy.control_plane.server import run_files

    run_files(folder, host, port, lambda url: print(f"the runs in {folder} are at {url}", flush=True))


@app.command(rich_help_panel=AFTER)
def purge(
    run: Run,
    url: Url = None,
    prefix: Prefix = "tidemill",
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also when the run's services are alive.")] = False,
    as_json: Json = False,
) -> None:
    """Delete everything a run left in the broker; its folder stays."""
    from deploy.client import find

    if as_json and not yes:
        raise ConfigError("--json cannot ask: give --yes as well")
    find.purge(find.find(run, url, prefix, any_schema=True), run, yes, force, as_json)


@app.command(rich_help_panel=SERVICES)
def acl(
    config: ConfigFile,
    overrides: Overrides = None,
    files: Annotated[Path | None, typer.Option(help="Folder to write: URLs of the roles, users of the server.")] = None,
    url: Annotated[str, typer.Option(help="With --files: the server as services reach it.")] = "redis://redis:6379/0",
    as_json: Json = False,
) -> None:
    """Make users for the server, one a role: ACL lines on stdout, their passwords on stderr; or all in files.

    With --json both are on stdout, or the names of the files.
    """
    from deploy.client.users import print_users, write_users

    loaded = load(config, overrides)
    if files is None:
        print_users(loaded, as_json)
    else:
        write_users(loaded, files, url, as_json)
