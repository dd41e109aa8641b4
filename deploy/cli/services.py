"""Commands that run one service of a run or its broker, prepare its model, or check its health."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.cli.options import (
    SERVICES,
    ConfigFile,
    Json,
    Meet,
    Name,
    NodeRank,
    Nodes,
    Overrides,
    Stay,
    in_ranks,
    load,
    machines_of,
    print_json,
    result_alone,
)
from schemas.errors import ERROR_EXIT, ConfigError

app = typer.Typer()


@app.command(rich_help_panel=SERVICES)
def feeder(config: ConfigFile, overrides: Overrides = None, name: Name = None, stay: Stay = False) -> None:
    """Run the service that admits prompts."""
    _serve("feeder", config, overrides, name, stay)


@app.command(rich_help_panel=SERVICES)
def generator(
    config: ConfigFile,
    overrides: Overrides = None,
    pool: Annotated[str | None, typer.Option(help="Pool of the generator, if the configuration has pools.")] = None,
    name: Name = None,
    stay: Stay = False,
) -> None:
    """Run one generator. Start one on each machine that should sample."""
    loaded = load(config, overrides)
    from deploy.services.main import run_role
    from deploy.services.pool import enter_pool
    from schemas.config import of_pool

    own = of_pool(loaded, pool)
    enter_pool(loaded, pool)
    run_role("generator", own, name, stay)


@app.command(rich_help_panel=SERVICES)
def node(
    config: ConfigFile,
    overrides: Overrides = None,
    broker: Annotated[
        str | None, typer.Option(help="URL of the run's broker, or a file that holds it; default: REDIS_URL.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of this machine; default: its host name.")] = None,
) -> None:
    """Run the generators of one more machine: as many as its GPUs are enough for, or those of its pools."""
    given = overrides or []
    if broker is not None:
        is_url = "://" in broker
        given = [*given, f"broker.url={broker if is_url else 'null'}"]
        os.environ.update({"REDIS_URL": "", "REDIS_URL_FILE": "" if is_url else broker})
    loaded = load(config, given)
    from deploy.launchers.node import run_node

    raise typer.Exit(run_node(loaded, name))


@app.command(rich_help_panel=SERVICES)
def reward(config: ConfigFile, overrides: Overrides = None, name: Name = None, stay: Stay = False) -> None:
    """Run the service that scores trajectories."""
    _serve("reward", config, overrides, name, stay)


@app.command(rich_help_panel=SERVICES)
def trainer(
    config: ConfigFile,
    overrides: Overrides = None,
    name: Name = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks on this machine; default: trainer.processes.")] = None,
    nodes: Nodes = 1,
    node_rank: NodeRank = 0,
    meet: Meet = None,
) -> None:
    """Run the trainer in as many ranks as asked for, or as one rank if torchrun started it."""
    loaded = load(config, overrides)
    from schemas.system.device_lock import SharedGpus

    placement = loaded.placement
    if placement is not None and placement.shared and SharedGpus.from_environment() is None:
        raise ConfigError(
            f"placement.trainer {placement.trainer} and placement.generator {placement.generator} share GPU"
            f" {placement.shared[0]}, which only `tidemill up` can do, on one machine: name other GPUs, or remove"
            " placement"
        )
    arguments = ["trainer", str(config), *(overrides or []), "--name", name or "trainer"]
    machines = machines_of(nodes, node_rank, meet)
    if machines is not None:
        from deploy.services.finished_run import FinishedRunWatch

        if FinishedRunWatch(loaded).finished_before():
            # The other machines have ended and would not come.
            print("tidemill: the run is finished: give it more trainer.steps", file=sys.stderr)
            return
    in_ranks(loaded, arguments, ranks=ranks, machines=machines)
    from deploy.services.main import run_role

    run_role("trainer", loaded, name)


@app.command(rich_help_panel=SERVICES)
def control(
    config: ConfigFile,
    overrides: Overrides = None,
    name: Name = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; overrides control.host.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; overrides control.port.")] = None,
    stay: Stay = False,
) -> None:
    """Run the control plane: status, orders and the dashboard over HTTP."""
    given = [f"control.{key}={value}" for key, value in (("host", host), ("port", port)) if value is not None]
    _serve("control", config, [*(overrides or []), *given], name, stay)


@app.command(rich_help_panel=SERVICES)
def prepare(
    config: ConfigFile,
    overrides: Overrides = None,
    as_json: Json = False,
    fetch: Annotated[bool, typer.Option("--fetch", help="Download a model of the Hub into HF_HOME.")] = False,
) -> None:
    """Check the configuration and its model, and train the warm_start model, before services start."""
    loaded = load(config, overrides)
    from deploy.checks.preflight import check_model
    from schemas.model_folder import fetch_model

    made: dict[str, Any] | None = {"model": loaded.model.path, "made": False}
    with result_alone(as_json):
        check_model(loaded)
        if loaded.warm_start is not None:
            from deploy.offline.warm_start import make_model

            made = make_model(loaded, loaded.warm_start)
        elif fetch and loaded.model.kind != "mlp":
            fetch_model(loaded.model.path)
    if as_json and made is not None:
        print_json(made)


@app.command(rich_help_panel=SERVICES)
def ready(
    config: ConfigFile,
    role: Annotated[str, typer.Argument(help="feeder, generator, reward or trainer.")],
    overrides: Overrides = None,
    name: Name = None,
    as_json: Json = False,
) -> None:
    """Exit with 0 if the service of this role on this machine is healthy: a container's health check."""
    loaded = load(config, overrides)
    from deploy.services.main import problem, service_name

    service = service_name(role, name)
    found = problem(loaded, service)
    if as_json:
        print_json({"service": service, "ready": found is None, "problem": found})
    if found is not None:
        print(f"tidemill: {found}", file=sys.stderr)
        raise typer.Exit(ERROR_EXIT)


@app.command(rich_help_panel=SERVICES)
def broker(
    config: ConfigFile,
    overrides: Overrides = None,
    host: Annotated[
        str | None, typer.Option(help="Name by which other machines reach this one; default: its host name.")
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 6379,
    url_file: Annotated[
        Path | None, typer.Option(help="File for its URL; default: redis_url in the run's folder.")
    ] = None,
) -> None:
    """Run a password-protected Redis or Valkey server for a run on several machines."""
    loaded = load(config, overrides)
    from deploy.run.broker_server import run_broker

    raise typer.Exit(run_broker(loaded, host, port, url_file))


def _serve(role: str, file: Path, overrides: list[str] | None, name: str | None, stay: bool) -> None:
    loaded = load(file, overrides)
    from deploy.services.main import run_role

    run_role(role, loaded, name, stay)
