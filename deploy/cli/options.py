"""Arguments and options that several commands share, and what several do first: load the configuration, start ranks."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from schemas.errors import ConfigError

if TYPE_CHECKING:
    from deploy.client.client import Client
    from deploy.services.torchrun import Machines
    from schemas.config import TidemillConfig

RUN, WATCH, AFTER, SERVICES, BENCHMARKS = "Run", "Watch and steer", "Afterwards", "Services", "Benchmarks"
"""Panels of ``tidemill --help``."""

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML configuration.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[a.b=c]...", help="Settings that override the file, for example trainer.steps=50."),
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Delete the earlier run of this name, and start from the beginning.")
]
Name = Annotated[str | None, typer.Option(help="Name of this service; each replica needs its own.")]
Stay = Annotated[bool, typer.Option("--stay", help="Keep the service running after the run has finished.")]

Run = Annotated[str, typer.Argument(metavar="RUN", help="Name of the run, or its YAML configuration.")]
RunOnDisk = Annotated[
    str,
    typer.Argument(metavar="CONFIG|RUN", help="The YAML configuration, or the run's folder or its name under runs/."),
]
Control = Annotated[
    str | None,
    typer.Option(help="URL of the control plane; default: TIDEMILL_CONTROL_URL, then the address in the run's folder."),
]
Url = Annotated[str | None, typer.Option(help="URL of the broker; default: REDIS_URL, then the run's embedded broker.")]
Prefix = Annotated[str, typer.Option(help="broker.prefix of the run; a configuration overrides it.")]


def parse_step(text: str) -> int | str:
    """Parse the value of --step; BadParameter if it is neither a number nor best."""
    if text != "best" and not text.isdecimal():
        raise typer.BadParameter(f"{text!r} must be the number of a step, or best")
    return text if text == "best" else int(text)


CheckpointStep = Annotated[
    Any,
    typer.Option(
        parser=parse_step,
        metavar="STEP|best",
        help="Step of the checkpoint, or best: that of the best evaluation; default: the newest complete one.",
    ),
]
Nodes = Annotated[int, typer.Option(min=1, help="Machines that train together, with as many ranks each.")]
NodeRank = Annotated[
    int, typer.Option(help="Number of this machine, from 0.", envvar=["SLURM_NODEID", "JOB_COMPLETION_INDEX"])
]
Meet = Annotated[str | None, typer.Option(help="HOST:PORT of machine 0, where the ranks of several machines meet.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Wait = Annotated[float, typer.Option(min=0, max=300, help="Seconds to wait for completion.")]


@dataclass(frozen=True)
class Target:
    """The run that a command is about, and how to reach it. Its fields are the options that such commands share."""

    run: Run
    control: Control = None
    url: Url = None
    prefix: Prefix = "tidemill"
    as_json: Json = False

    def open(self) -> Client:
        """Return a client of the run's control plane, or of its broker if no control plane answers."""
        from deploy.client.client import open_client

        return open_client(self.run, self.control, self.url, self.prefix)


def with_fields(kind: type, command: Callable[..., None], names: Collection[str] = ()) -> Callable[..., None]:
    """Give a command options for the fields of its first parameter, of this dataclass; names: only for these fields."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    fields = inspect.signature(kind, eval_str=True).parameters
    asked = [field for name, field in fields.items() if name in (names or fields)]

    @functools.wraps(command)
    def wrapper(**given: Any) -> None:
        command(kind(**{field.name: given.pop(field.name) for field in asked}), **given)

    # What has to be given comes first.
    needed = [field for field in asked if field.default is field.empty]
    shown = [*needed, *own, *(field for field in asked if field not in needed)]
    merged = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in shown]
    wrapper.__signature__ = inspect.Signature(merged)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in merged}
    return wrapper


on_run = functools.partial(with_fields, Target)
"""Gives a command RUN, --control, --url, --prefix and --json: it asks the control plane, or the broker."""
on_control_plane = functools.partial(with_fields, Target, names=("run", "control", "as_json"))
"""Gives a command RUN, --control and --json: it asks the control plane only."""


def print_json(found: object) -> None:
    """Print the result of ``--json`` on one line."""
    print(json.dumps(found, ensure_ascii=False))


@contextlib.contextmanager
def result_alone(as_json: bool) -> Iterator[None]:
    """Keep standard output for the JSON: this process and its children print to stderr meanwhile."""
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
    """Load and check the configuration, before anything heavier is imported. ConfigError."""
    from schemas.config import load_config

    return load_config(file, overrides or [])


def machines_of(nodes: int, node_rank: int, meet: str | None) -> Machines | None:
    """Return the machines that train together, None for one; ConfigError if these options name none."""
    if nodes == 1:
        return None
    if meet is None:
        raise ConfigError("--nodes needs --meet HOST:PORT, the address of machine 0")
    from deploy.services.torchrun import Machines

    return Machines(nodes, node_rank, meet)


def in_ranks(
    config: TidemillConfig,
    arguments: list[str],
    as_json: bool = False,
    ranks: int | None = None,
    machines: Machines | None = None,
) -> None:
    """Run this command in several ranks and exit; return if there is one rank, or this process is a rank.

    as_json: add ``--json``. ranks: of this machine, by default trainer.processes. machines: all that train together.
    """
    from deploy.services import torchrun

    count = ranks or config.trainer.processes
    if (count > 1 or machines) and not torchrun.is_rank():
        asked = [*arguments, "--json"] if as_json else arguments
        raise typer.Exit(torchrun.launch(count, asked, config.supervisor.grace_s, machines))
