"""What each launcher that has a command may be told: options of the command, and ``launcher.args`` of a configuration.

It is apart from the launchers, so that `tidemill --help` loads nothing that they need.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer


def parse_gpus(text: str) -> float | str:
    """Return the number of GPUs in an option, or ``auto``; BadParameter for anything else."""
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither auto nor a number of GPUs") from None


def parse_whole_gpus(text: str) -> int | str:
    """Return a whole number of GPUs, or ``auto``."""
    number = parse_gpus(text)
    if isinstance(number, float) and number != int(number):
        raise typer.BadParameter(f"{text} is not a whole number of GPUs")
    return number if isinstance(number, str) else int(number)


AUTO, NODES = "N|auto", "Nodes of the trainer."
OF_GENERATOR = "GPUs of one generator; auto: as many as its engine needs."
OF_TRAINER = "GPUs of the trainer on each node, one per rank; auto: trainer.processes."
OfGenerator = Annotated[Any, typer.Option(parser=parse_whole_gpus, metavar=AUTO, help=OF_GENERATOR)]
OfTrainer = Annotated[Any, typer.Option(parser=parse_whole_gpus, metavar=AUTO, help=OF_TRAINER)]


@dataclass(frozen=True)
class SlurmOptions:
    """What Slurm is asked for; ``auto`` is what each service needs where Slurm says that there are any GPUs.

    folder: on a file system that all nodes share. own_broker: start a server, or else use REDIS_URL or REDIS_URL_FILE.
    """

    folder: Annotated[
        Path | None, typer.Option(help="Folder for the scripts; default: slurm/ in the run's folder.")
    ] = None
    generators: Annotated[int | None, typer.Option(help="Size of the job array; default: generator.replicas.")] = None
    generator_gpus: OfGenerator = "auto"
    trainer_nodes: Annotated[int, typer.Option(help=NODES)] = 1
    trainer_gpus: OfTrainer = "auto"
    time: Annotated[str, typer.Option(help="Time limit of each job; a job that needs longer is requeued.")] = "24:00:00"
    partition: Annotated[str | None, typer.Option(help="Partition of all jobs.")] = None
    account: Annotated[str | None, typer.Option(help="Account of all jobs.")] = None
    setup: Annotated[
        str | None, typer.Option(help="Shell line that puts tidemill on the PATH; default: activate this environment.")
    ] = None
    container: Annotated[
        str | None, typer.Option(help="Prefix that runs a command in the image of {role}, such as apptainer exec.")
    ] = None
    sbatch: Annotated[list[str] | None, typer.Option(help="An #SBATCH option for all jobs; repeatable.")] = None
    own_broker: Annotated[
        bool, typer.Option("--broker/--no-broker", help="Start a broker in a job, or use your REDIS_URL.")
    ] = True


@dataclass(frozen=True)
class KubernetesOptions:
    """What a run's objects are made from.

    access_mode: ReadWriteOnce puts trainer and control plane on one node. folder: files there are replaced.
    """

    folder: Annotated[
        Path | None, typer.Option(help="Folder for the objects; default: kubernetes/ in the run's folder.")
    ] = None
    namespace: Annotated[
        str | None, typer.Option(help="Namespace of this run alone, which must exist; default: tidemill-NAME.")
    ] = None
    registry: Annotated[str, typer.Option(help="Where the images REGISTRY/tidemill-ROLE are.")] = "registry.example"
    tag: Annotated[str, typer.Option(help="Version of the images; with GPUs, TAG-cuda.")] = "0.1.0"
    trainer_nodes: Annotated[int, typer.Option(help=NODES)] = 1
    trainer_gpus: OfTrainer = "auto"
    generator_gpus: OfGenerator = "auto"
    storage: Annotated[str, typer.Option(help="Size of the volume for the run's files.")] = "200Gi"
    storage_class: Annotated[str | None, typer.Option(help="Class of the volume; default: that of the cluster.")] = None
    access_mode: Annotated[
        str, typer.Option(help="ReadWriteMany, or ReadWriteOnce if only one node can mount the volume.")
    ] = "ReadWriteMany"
    extra_files: Annotated[
        list[Path] | None, typer.Option("--file", help="A file for the pods that no setting names; repeatable.")
    ] = None
    broker: Annotated[bool, typer.Option(help="Add a Redis for the run, or use yours.")] = True
    keda: Annotated[bool, typer.Option(help="Let KEDA scale by the work that waits.")] = False
    helm: Annotated[bool, typer.Option(help="Write values.yaml for the Helm chart, not objects.")] = False


@dataclass(frozen=True)
class RayOptions:
    """What Ray is asked for each service; ``auto`` is what it needs if there are GPUs, or a part of a single GPU."""

    address: Annotated[
        str, typer.Option(help="Address of the cluster; auto finds it, local starts one on this machine.")
    ] = "auto"
    generators: Annotated[
        int | None, typer.Option(help="Minimum number of generators; default: generator.replicas.")
    ] = None
    max_generators: Annotated[int | None, typer.Option(help="Maximum number of generators; default: the minimum.")] = (
        None
    )
    generator_gpus: Annotated[Any, typer.Option(parser=parse_gpus, metavar=AUTO, help=OF_GENERATOR)] = "auto"
    trainer_gpus: Annotated[Any, typer.Option(parser=parse_gpus, metavar=AUTO, help=OF_TRAINER)] = "auto"
    generator_cpus: Annotated[float, typer.Option(help="CPUs of one generator.")] = 1.0
    trainer_cpus: Annotated[float, typer.Option(help="CPUs of the trainer.")] = 1.0
