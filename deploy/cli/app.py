"""The ``tidemill`` command. Commands import heavy modules themselves, so that ``tidemill --help`` answers at once."""

import errno
import os
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli import launch, letters, offline, orders, runs, services, status, trajectories
from deploy.cli.options import (
    BENCHMARKS,
    RUN,
    Json,
    Meet,
    NodeRank,
    Nodes,
    Overrides,
    in_ranks,
    load,
    machines_of,
    print_json,
)
from schemas.errors import (
    CONFIG_EXIT,
    ERROR_EXIT,
    EXIT_CODES,
    OK_EXIT,
    ConfigError,
    DiskError,
    TidemillError,
    first_error,
)

if TYPE_CHECKING:
    from deploy.checks.finding import Finding

SERVICE_COMMANDS = (["feeder"], ["generator"], ["reward"], ["trainer"], ["control"])
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Errors of a disk, which are not errors of the user's."""

app = typer.Typer(
    name="tidemill",
    help="Asynchronous reinforcement learning of language models over a message broker.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 an error, 2 wrong configuration or usage, 3 another trainer took over, 4 accepted but"
    " not done in time, 5 rejected, 6 the run cannot continue, 75 a trainer has to resume elsewhere, 130 interrupted.",
    pretty_exceptions_enable=False,
)

for _group in (launch, status, orders, letters, trajectories, runs, offline, services):
    app.add_typer(_group.app)
for _command in entry_points(group="tidemill.commands"):
    # Container images leave the benchmarks out.
    if find_spec(_command.module.partition(".")[0]):
        app.add_typer(_command.load(), name=_command.name, rich_help_panel=BENCHMARKS)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tidemill {version('tidemill')}")
        raise typer.Exit


@app.callback()
def options(
    show: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Asynchronous reinforcement learning of language models over a message broker."""


@app.command(rich_help_panel=RUN)
def doctor(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="The YAML configuration.")] = None,
    overrides: Overrides = None,
    as_json: Json = False,
    step_s: Annotated[
        float | None,
        typer.Option(
            min=1e-3, help="Seconds of a training step, to check agents' deadlines; default: as the run measured."
        ),
    ] = None,
    ranks: Annotated[
        bool, typer.Option("--ranks", help="Start the trainer's ranks and check devices and connections instead.")
    ] = False,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Compute with the configured model on this machine's GPU, trainer and engine.")
    ] = False,
    nodes: Nodes = 1,
    node_rank: NodeRank = 0,
    meet: Meet = None,
) -> None:
    """Check this machine and, if given, a configuration; exit code 2 if a check fails."""
    from deploy.doctor.doctor import diagnose, print_findings

    if gpu:
        if config is None or ranks:
            raise ConfigError("--gpu needs a configuration, and goes without --ranks")
        from deploy.doctor.gpu import check_gpu
        from deploy.launchers.gpus import find_gpus

        loaded = load(config, overrides)
        findings: Iterable[Finding] = check_gpu(
            config, overrides or [], loaded, len(find_gpus()) or loaded.trainer.processes
        )
    elif ranks:
        if config is None:
            raise ConfigError("--ranks needs a configuration, for trainer.processes and run.folder")
        loaded, machines = load(config, overrides), machines_of(nodes, node_rank, meet)
        in_ranks(loaded, ["doctor", str(config), *(overrides or []), "--ranks"], as_json, machines=machines)
        from deploy.doctor.ranks import check_ranks

        if (compared := check_ranks(loaded)) is None:
            raise typer.Exit(OK_EXIT)
        findings = compared
    else:
        findings = diagnose(config, overrides or [], step_s)
    failed = any(finding.level == "fail" for finding in print_findings(findings, as_json))
    raise typer.Exit(CONFIG_EXIT if failed else OK_EXIT)


def main() -> None:
    """Run the command, and exit with its code: the list is the epilog of ``tidemill --help``."""
    try:
        app()
    except TidemillError as error:
        sys.exit(_complain(error))
    except OSError as error:
        # A service keeps its traceback, which goes to its log, and is restarted.
        full = error.errno in FULL
        if (error.filename is None and not full) or sys.argv[1:2] in SERVICE_COMMANDS:
            raise
        # The error of a file that was opened earlier has no name.
        text = str(error.strerror) if error.filename is None else f"{error.filename}: {error.strerror}"
        sys.exit(_complain(DiskError(text) if full else ConfigError(text)))
    except ExceptionGroup as group:
        # Errors of a task group; any other error is a bug and keeps its traceback.
        ours, others = group.split(TidemillError)
        if ours is None or others is not None:
            raise
        sys.exit(_complain(first_error(ours)))


def _complain(error: TidemillError) -> int:
    """Print the error as one line on stderr, with --json also as an object on stdout; returns the exit code."""
    text = " ".join(str(error).split())
    code = next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), ERROR_EXIT)
    print(f"tidemill: {text}", file=sys.stderr)
    # Of several ranks that fail together, one answers.
    if "--json" in sys.argv and os.environ.get("RANK", "0") == "0":
        print_json({"error": text, "exit_code": code})
    return code
