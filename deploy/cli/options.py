"""Arguments and options that several commands share, and what several do first: load the configuration, start ranks."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from schemas.config import TidemillConfig

RUN, WATCH, AFTER, SERVICES, BENCHMARKS = "Run", "Watch and steer", "Afterwards", "Services", "Benchmarks"
"""Panels of ``tidemill --help``."""

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML configuration.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[a.b=c]...", help="Settings that win over the file, e.g. trainer.steps=50."),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Delete what an earlier run left, and start anew.")]
Name = Annotated[str | None, typer.Option(help="Name of this service; must differ from replica to replica.")]
Stay = Annotated[bool, typer.Option("--stay", help="Go on when the run is finished; else the service ends then.")]

Run = Annotated[str, typer.Argument(metavar="RUN", help="Name of the run, or its YAML configuration.")]
RunOnDisk = Annotated[
    str, typer.Argument(metavar="CONFIG|RUN", help="The YAML configuration, or the run's name under runs/ or folder.")
]
Control = Annotated[
    str | None,
    typer.Option(help="URL of the control plane; TIDEMILL_CONTROL_URL, else that of the run's folder, by default."),
]
Url = Annotated[str | None, typer.Option(help="The broker; REDIS_URL, else the embedded one of the run, by default.")]
Prefix = Annotated[str, typer.Option(help="broker.prefix of the run; read from the configuration if that is given.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Wait = Annotated[float, typer.Option(min=0, max=300, help="Seconds to wait until it is done.")]


def print_json(found: object) -> None:
    """Print what ``--json`` asks for, in one line."""
    import json

    print(json.dumps(found, ensure_ascii=False))


@contextlib.contextmanager
def result_alone(as_json: bool) -> Iterator[None]:
    """Keep standard output for the JSON: what this process and those that it starts print meanwhile goes to stderr."""
    if not as_json:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def load(file: Path, overrides: list[str] | None) -> TidemillConfig:
    """The configuration, checked before anything heavier is imported; ConfigError."""
    from schemas.config import load_config

    return load_config(file, overrides or [])


def in_ranks(config: TidemillConfig, arguments: list[str], as_json: bool = False) -> None:
    """Do this command in trainer.processes ranks and exit; returns where there is one, or this is one of them.

    as_json: with ``--json``, which the first rank answers.
    """
    from deploy.services import torchrun

    if config.trainer.processes > 1 and not torchrun.is_rank():
        asked = [*arguments, "--json"] if as_json else arguments
        raise typer.Exit(torchrun.launch(config.trainer.processes, asked, config.supervisor.grace_s))
