"""Commands that start a run: init writes a configuration; up, slurm, kubernetes and ray start its services."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from deploy.cli.options import RUN, ConfigFile, Fresh, Json, Overrides, load, print_json, result_alone

if TYPE_CHECKING:
    from deploy.launchers.factory import Launcher
    from schemas.config import TidemillConfig

app = typer.Typer()
HERE = Path(".")

Gpus = Annotated[str, typer.Option(metavar="N|auto", help="GPUs of one generator; auto: as many as its engine needs.")]
TrainerGpus = Annotated[
    str, typer.Option(metavar="N|auto", help="GPUs of the trainer on each node, one per rank; auto: trainer.processes.")
]


def _number(gpus: str) -> float | Literal["auto"]:
    """Return the number in an option, or ``auto``; typer.BadParameter for anything else."""
    if gpus == "auto":
        return "auto"
    try:
        return float(gpus)
    except ValueError:
        raise typer.BadParameter(f"{gpus!r} is neither auto nor a number of GPUs") from None


def _whole(gpus: str) -> int | Literal["auto"]:
    number = _number(gpus)
    if number == "auto" or number == int(number):
        return "auto" if number == "auto" else int(number)
    raise typer.BadParameter(f"{gpus} is not a whole number of GPUs")


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
    for file in files:
        print(file)
    print(f"next: tidemill doctor {folder / 'config.yaml'}, then tidemill up {folder / 'config.yaml'}")


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
def slurm(
    config: ConfigFile,
    overrides: Overrides = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder for the scripts; default: slurm/ in the run's folder.")
    ] = None,
    generators: Annotated[int | None, typer.Option(help="Size of the job array; default: generator.replicas.")] = None,
    generator_gpus: Gpus = "auto",
    trainer_nodes: Annotated[int, typer.Option(help="Nodes of the trainer.")] = 1,
    trainer_gpus: TrainerGpus = "auto",
    time: Annotated[
        str, typer.Option(help="Time limit of each job; a job that needs longer is requeued.")
    ] = "24:00:00",
    partition: Annotated[str | None, typer.Option(help="Partition of all jobs.")] = None,
    account: Annotated[str | None, typer.Option(help="Account of all jobs.")] = None,
    setup: Annotated[
        str | None, typer.Option(help="Shell line that puts tidemill on the PATH; default: activate this environment.")
    ] = None,
    container: Annotated[
        str | None, typer.Option(help="Prefix that runs a command in the image of {role}, such as apptainer exec.")
    ] = None,
    sbatch: Annotated[list[str] | None, typer.Option(help="An #SBATCH option for all jobs; repeatable.")] = None,
    broker: Annotated[bool, typer.Option(help="Start a broker in a job, or use your REDIS_URL.")] = True,
    as_json: Json = False,
) -> None:
    """Write scripts that run all services as Slurm jobs. Review them, then run the last one."""
    loaded = load(config, overrides)
    from deploy.launchers.slurm import Slurm

    launcher = Slurm(
        generators=generators,
        generator_gpus=_whole(generator_gpus),
        trainer_nodes=trainer_nodes,
        trainer_gpus=_whole(trainer_gpus),
        time=time,
        partition=partition,
        account=account,
        setup=setup,
        container=container,
        sbatch=tuple(sbatch or ()),
        own_broker=broker,
        folder=folder,
    )
    with result_alone(as_json):
        scripts = launcher.prepare(loaded)
    if as_json:
        print_json({"run": loaded.run.name, "scripts": [str(path) for path in scripts]})
        return
    for path in scripts:
        print(path)


@app.command(rich_help_panel=RUN)
def kubernetes(
    config: ConfigFile,
    overrides: Overrides = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder for the objects; default: kubernetes/ in the run's folder.")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Namespace of this run alone, which must exist; default: tidemill-NAME.")
    ] = None,
    registry: Annotated[str, typer.Option(help="Where the images REGISTRY/tidemill-ROLE are.")] = "registry.example",
    tag: Annotated[str, typer.Option(help="Version of the images; with GPUs, TAG-cuda.")] = "0.1.0",
    trainer_nodes: Annotated[int, typer.Option(help="Nodes of the trainer.")] = 1,
    trainer_gpus: TrainerGpus = "auto",
    generator_gpus: Gpus = "auto",
    storage: Annotated[str, typer.Option(help="Size of the volume for the run's files.")] = "200Gi",
    storage_class: Annotated[
        str | None, typer.Option(help="Class of the volume; default: that of the cluster.")
    ] = None,
    access_mode: Annotated[
        str, typer.Option(help="ReadWriteMany, or ReadWriteOnce if only one node can mount the volume.")
    ] = "ReadWriteMany",
    file: Annotated[
        list[Path] | None, typer.Option(help="A file for the pods that no setting names; repeatable.")
    ] = None,
    broker: Annotated[bool, typer.Option(help="Add a Redis for the run, or use yours.")] = True,
    keda: Annotated[bool, typer.Option(help="Let KEDA scale by the work that waits.")] = False,
    helm: Annotated[bool, typer.Option(help="Write values.yaml for the Helm chart, not objects.")] = False,
    as_json: Json = False,
) -> None:
    """Write the Kubernetes objects of a run, with its configuration and files. Review them, then run apply.sh."""
    loaded = load(config, overrides)
    from deploy.launchers.kubernetes import Kubernetes

    launcher = Kubernetes(
        namespace=namespace,
        registry=registry,
        tag=tag,
        trainer_nodes=trainer_nodes,
        trainer_gpus=_whole(trainer_gpus),
        generator_gpus=_whole(generator_gpus),
        storage=storage,
        storage_class=storage_class,
        access_mode=access_mode,
        extra_files=tuple(file or ()),
        broker=broker,
        keda=keda,
        helm=helm,
        folder=folder,
    )
    with result_alone(as_json):
        written = launcher.prepare(loaded)
    if as_json:
        print_json({"run": loaded.run.name, "files": [str(path) for path in written]})
        return
    for path in written:
        print(path)


@app.command(rich_help_panel=RUN)
def ray(
    config: ConfigFile,
    overrides: Overrides = None,
    address: Annotated[
        str, typer.Option(help="Address of the cluster; auto finds it, local starts one on this machine.")
    ] = "auto",
    generators: Annotated[
        int | None, typer.Option(help="Minimum number of generators; default: generator.replicas.")
    ] = None,
    max_generators: Annotated[
        int | None, typer.Option(help="Maximum number of generators; default: the minimum.")
    ] = None,
    generator_gpus: Gpus = "auto",
    trainer_gpus: TrainerGpus = "auto",
    generator_cpus: Annotated[float, typer.Option(help="CPUs of one generator.")] = 1.0,
    trainer_cpus: Annotated[float, typer.Option(help="CPUs of the trainer.")] = 1.0,
    fresh: Fresh = False,
    as_json: Json = False,
) -> None:
    """Start all services on a Ray cluster, train until the last step, and resume a stopped run."""
    loaded = load(config, overrides)
    from deploy.launchers.ray import Ray

    launcher = Ray(
        address,
        trainer_cpus,
        _number(trainer_gpus),
        generator_cpus,
        _number(generator_gpus),
        generators,
        max_generators,
    )
    raise typer.Exit(_launch(launcher, loaded, fresh, as_json))


def _launch(launcher: Launcher, config: TidemillConfig, fresh: bool, as_json: bool) -> int:
    """Run until the launcher returns; return the exit code, which is also in the JSON."""
    with result_alone(as_json):
        code = launcher.launch(config, fresh)
    if as_json:
        from deploy.client.report import describe_ending

        print_json(describe_ending(config, code))
    return code
