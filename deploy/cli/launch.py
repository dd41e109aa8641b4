"""Commands that start a run: init writes a configuration; up, slurm, kubernetes and ray start its services."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.options import RUN, ConfigFile, Fresh, Json, Overrides, load, print_json, result_alone, with_fields
from deploy.launcher_options import KubernetesOptions, RayOptions, SlurmOptions

if TYPE_CHECKING:
    from deploy.launchers.factory import Launcher
    from schemas.config import TidemillConfig

app = typer.Typer()
HERE = Path(".")


@app.command(rich_help_panel=RUN)
def init(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="Folder for the files; default: the current one.")
    ] = HERE,
    name: Annotated[str | None, typer.Option(help="Name of the run; default: that of the folder.")] = None,
    model: Annotated[
        str, typer.Option(help="Folder of a model, or its hub id (org/name, org/name@revision).")
    ] = "Qwen/Qwen2.5-0.5B-Instruct",
    data: Annotated[
        Path | None, typer.Option(help="JSON lines with prompt and answer; default: a file with a few sums.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 100,
    as_json: Json = False,
) -> None:
    """Write a configuration, its schema, a reward and prompts to start from. Existing files are not replaced."""
    from deploy.run.new_run import write_new_run

    files = write_new_run(folder, name, model, data, steps)
    if as_json:
        print_json({"files": [str(file) for file in files]})
        return
    print(*files, sep="\n")
    config = shlex.quote(str(folder / "config.yaml"))
    print(f"next: tidemill doctor {config}, then tidemill up {config}")


@app.command(rich_help_panel=RUN)
def up(config: ConfigFile, overrides: Overrides = None, fresh: Fresh = False, as_json: Json = False) -> None:
    """Start all services, train until the last step, and resume a stopped run; launcher.name says where.

    With --json, progress goes to stderr, and a JSON object with the result to stdout.
    """
    loaded = load(config, overrides)
    from deploy.checks.names import check_names

    # Checked before imports that take a second.
    check_names(loaded)
    from deploy.launchers.factory import build_launcher

    raise typer.Exit(_launch(build_launcher(loaded), loaded, fresh, as_json))


@app.command(rich_help_panel=RUN)
@partial(with_fields, SlurmOptions)
def slurm(options: SlurmOptions, config: ConfigFile, overrides: Overrides = None, as_json: Json = False) -> None:
    """Write scripts that run all services as Slurm jobs. Review them, then run the last one."""
    loaded = load(config, overrides)
    from deploy.launchers.slurm import Slurm

    _write_files(Slurm(**vars(options)).prepare, loaded, "scripts", as_json)


@app.command(rich_help_panel=RUN)
@partial(with_fields, KubernetesOptions)
def kubernetes(
    options: KubernetesOptions, config: ConfigFile, overrides: Overrides = None, as_json: Json = False
) -> None:
    """Write the Kubernetes objects of a run, with its configuration and files. Review them, then run apply.sh."""
    loaded = load(config, overrides)
    from deploy.launchers.kubernetes import Kubernetes

    _write_files(Kubernetes(**vars(options)).prepare, loaded, "files", as_json)


def _write_files(
    prepare: Callable[[TidemillConfig], Sequence[Path]], config: TidemillConfig, name: str, as_json: bool
) -> None:
    with result_alone(as_json):
        files = prepare(config)
    if as_json:
        print_json({"run": config.run.name, name: [str(path) for path in files]})
    else:
        print(*files, sep="\n")


@app.command(rich_help_panel=RUN)
@partial(with_fields, RayOptions)
def ray(
    options: RayOptions, config: ConfigFile, overrides: Overrides = None, fresh: Fresh = False, as_json: Json = False
) -> None:
    """Start all services on a Ray cluster, train until the last step, and resume a stopped run."""
    loaded = load(config, overrides)
    from deploy.launchers.ray import Ray

    raise typer.Exit(_launch(Ray(**vars(options)), loaded, fresh, as_json))


def _launch(launcher: Launcher, config: TidemillConfig, fresh: bool, as_json: bool) -> int:
    """Run until the launcher returns; return the exit code, which is also in the JSON."""
    with result_alone(as_json):
        code = launcher.launch(config, fresh)
    if as_json:
        from deploy.client.report import describe_ending

        print_json(describe_ending(config, code))
    return code
