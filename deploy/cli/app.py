"""The ``tidemill`` command.

Promises: a wrong configuration is one line on stderr and exit code 2; whatever is heavy is
imported by the command that needs it, so that ``tidemill --help`` answers at once.
"""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Annotated

import typer

from deploy.bench.cli import app as bench
from deploy.cli.control import app as control_commands
from deploy.cli.inspect import app as inspect_commands
from deploy.cli.launch import app as launch_commands
from deploy.cli.offline import app as offline_commands
from deploy.cli.options import ConfigFile, Json, Name, Overrides, Stay, in_ranks, load
from deploy.cli.runs import app as run_commands
from schemas.errors import (
    CONFIG_EXIT,
    ERROR_EXIT,
    FENCED_EXIT,
    OK_EXIT,
    REFUSED_EXIT,
    RUN_FAILED_EXIT,
    ConfigError,
    DiskError,
    FencedError,
    RefusedError,
    RunFailed,
    TidemillError,
)

SERVICES = (["feeder"], ["generator"], ["reward"], ["trainer"], ["control"])
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Errors of a disk, for which the user has named nothing wrong."""

app = typer.Typer(
    name="tidemill",
    help="Asynchronous reinforcement learning of language models over a message broker.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(launch_commands)
app.add_typer(bench, name="bench")
app.add_typer(control_commands)
app.add_typer(inspect_commands)
app.add_typer(run_commands)
app.add_typer(offline_commands)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"tidemill {version('tidemill')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Asynchronous reinforcement learning of language models over a message broker."""


@app.command()
def feeder(config: ConfigFile, overrides: Overrides = None, name: Name = None, stay: Stay = False) -> None:
    """Run the service that admits prompts."""
    _serve("feeder", config, overrides, name, stay)


@app.command()
def generator(config: ConfigFile, overrides: Overrides = None, name: Name = None, stay: Stay = False) -> None:
    """Run one generator; start as many as there are machines."""
    _serve("generator", config, overrides, name, stay)


@app.command()
def reward(config: ConfigFile, overrides: Overrides = None, name: Name = None, stay: Stay = False) -> None:
    """Run the service that scores trajectories."""
    _serve("reward", config, overrides, name, stay)


@app.command()
def trainer(config: ConfigFile, overrides: Overrides = None, name: Name = None) -> None:
    """Run the trainer, in trainer.processes ranks unless it was started as one of several."""
    loaded = load(config, overrides)
    in_ranks(loaded, ["trainer", str(config), *(overrides or []), "--name", name or "trainer"])
    from deploy.services.main import run_role

    run_role("trainer", loaded, name)


@app.command()
def control(
    config: ConfigFile,
    overrides: Overrides = None,
    name: Name = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on, instead of control.host.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on, instead of control.port.")] = None,
    stay: Stay = False,
) -> None:
    """Run the control plane: status, orders and the dashboard over HTTP."""
    given = [f"control.{key}={value}" for key, value in (("host", host), ("port", port)) if value is not None]
    _serve("control", config, [*(overrides or []), *given], name, stay)


@app.command()
def prepare(config: ConfigFile, overrides: Overrides = None) -> None:
    """Check the configuration and its model, and make that of warm_start if there is one: before services start."""
    loaded = load(config, overrides)
    from deploy.run.preflight import check_model

    check_model(loaded)
    if loaded.warm_start is not None:
        from deploy.offline.warm_start import make_model

        make_model(loaded, loaded.warm_start)


@app.command()
def ready(
    config: ConfigFile,
    role: Annotated[str, typer.Argument(help="feeder, generator, reward or trainer.")],
    overrides: Overrides = None,
    name: Name = None,
) -> None:
    """Exit with 0 if this machine's service of a role is up: the health check of its container."""
    loaded = load(config, overrides)
    from deploy.services.main import problem, service_name

    found = problem(loaded, service_name(role, name))
    if found is not None:
        print(f"tidemill: {found}", file=sys.stderr)
        raise typer.Exit(ERROR_EXIT)


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="The YAML configuration.")] = None,
    overrides: Overrides = None,
    as_json: Json = False,
    step_s: Annotated[
        float | None,
        typer.Option(
            "--step-s", min=0.001, help="Seconds of a training step, for agents' times; by default as the run measured."
        ),
    ] = None,
) -> None:
    """Check this machine, and the configuration if one is given; exit code 2 when something is wrong."""
    from deploy.machine.doctor import look_at, print_findings

    findings = look_at(config, overrides or [], step_s)
    print_findings(findings, as_json)
    raise typer.Exit(CONFIG_EXIT if any(finding.level == "fail" for finding in findings) else OK_EXIT)


def _serve(role: str, file: Path, overrides: list[str] | None, name: str | None, stay: bool) -> None:
    loaded = load(file, overrides)
    from deploy.services.main import run_role

    run_role(role, loaded, name, stay)


def main() -> None:
    """Entry point. Exit code 2: wrong configuration or usage; 3: another trainer took over; 5: the control
    plane refuses; 6: everything of the run fails; 1: another error."""
    try:
        app()
    except TidemillError as error:
        sys.exit(_complain(error))
    except OSError as error:
        # A service keeps its traceback, which goes to its log, and is started again.
        if error.filename is None or sys.argv[1:2] in SERVICES:
            raise
        text = f"{error.filename}: {error.strerror}"
        sys.exit(_complain(DiskError(text) if error.errno in FULL else ConfigError(text)))
    except ExceptionGroup as group:
        # What went wrong in a task group; anything that is not ours is a bug and keeps its traceback.
        ours, others = group.split(TidemillError)
        if ours is None or others is not None:
            raise
        sys.exit(_complain(_first(ours)))


def _complain(error: TidemillError) -> int:
    """Print the error as one line on stderr; returns the exit code."""
    print(f"tidemill: {' '.join(str(error).split())}", file=sys.stderr)
    if isinstance(error, ConfigError):
        return CONFIG_EXIT
    if isinstance(error, RefusedError):
        return REFUSED_EXIT
    if isinstance(error, RunFailed):
        return RUN_FAILED_EXIT
    return FENCED_EXIT if isinstance(error, FencedError) else ERROR_EXIT


def _first(group: ExceptionGroup[TidemillError]) -> TidemillError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, ExceptionGroup) else error
