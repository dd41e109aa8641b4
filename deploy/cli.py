"""The ``tidemill`` command.

Promises: a wrong configuration is one line on stderr and exit code 2; whatever is heavy is
imported by the command that needs it, so that ``tidemill --help`` answers at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from deploy.restarts import CONFIG_EXIT, FENCED_EXIT
from schemas.errors import ConfigError, FencedError, TidemillError

app = typer.Typer(
    name="tidemill",
    help="Asynchronous reinforcement learning of language models over a message broker.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML configuration.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[a.b=c]...", help="Settings that win over the file, e.g. trainer.steps=50."),
]
Name = Annotated[str | None, typer.Option(help="Name of this service; must differ from replica to replica.")]


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
def up(config: ConfigFile, overrides: Overrides = None) -> None:
    """Run everything on this machine until the training is done."""
    from deploy.up import run_up
    from schemas.config import load_config

    raise typer.Exit(run_up(load_config(config, overrides or []), config, overrides or []))


@app.command()
def feeder(config: ConfigFile, overrides: Overrides = None, name: Name = None) -> None:
    """Run the service that admits prompts."""
    _serve("feeder", config, overrides, name)


@app.command()
def generator(config: ConfigFile, overrides: Overrides = None, name: Name = None) -> None:
    """Run one generator; start as many as there are machines."""
    _serve("generator", config, overrides, name)


@app.command()
def reward(config: ConfigFile, overrides: Overrides = None, name: Name = None) -> None:
    """Run the service that scores trajectories."""
    _serve("reward", config, overrides, name)


@app.command()
def trainer(config: ConfigFile, overrides: Overrides = None, name: Name = None) -> None:
    """Run the trainer."""
    _serve("trainer", config, overrides, name)


@app.command()
def sft(config: ConfigFile, overrides: Overrides = None) -> None:
    """Make the model of warm_start by supervised training."""
    from deploy.warm_start import make_model
    from schemas.config import load_config

    make_model(load_config(config, overrides or []))


@app.command("eval")
def evaluate(
    config: ConfigFile,
    overrides: Overrides = None,
    model: Annotated[Path | None, typer.Option(help="Folder of the model; model.path by default.")] = None,
) -> None:
    """Answer the held-out prompts with a model, without a broker, and print its accuracy."""
    from deploy.evaluation import evaluate_model
    from schemas.config import load_config

    evaluate_model(load_config(config, overrides or []), model)


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="The YAML configuration.")] = None,
    overrides: Overrides = None,
) -> None:
    """Check this machine, and the configuration if one is given."""
    from deploy.doctor import examine, print_findings

    findings = examine(config, overrides or [])
    print_findings(findings)
    raise typer.Exit(1 if any(finding.level == "fail" for finding in findings) else 0)


def _serve(role: str, file: Path, overrides: list[str] | None, name: str | None) -> None:
    from deploy.roles import run_role
    from schemas.config import load_config

    run_role(role, load_config(file, overrides or []), name)


def main() -> None:
    """Entry point. Exit code 2: wrong configuration or usage; 3: another trainer took over; 1: another error."""
    try:
        app()
    except TidemillError as error:
        sys.exit(_complain(error))
    except ExceptionGroup as group:
        # What went wrong in a task group; anything that is not ours is a bug and keeps its traceback.
        ours, others = group.split(TidemillError)
        if ours is None or others is not None:
            raise
        sys.exit(_complain(_first(ours)))


def _complain(error: TidemillError) -> int:
    """One line on stderr; returns the exit code."""
    print(f"tidemill: {' '.join(str(error).split())}", file=sys.stderr)
    if isinstance(error, ConfigError):
        return CONFIG_EXIT
    return FENCED_EXIT if isinstance(error, FencedError) else 1


def _first(group: ExceptionGroup[TidemillError]) -> TidemillError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, ExceptionGroup) else error


if __name__ == "__main__":
    main()
