"""A service in this process, as the supervisor, Compose, Kubernetes and Slurm start it; and its health.

Containers' health checks read the service's heartbeat in the broker. Use the answer to tell when a service has come up,
not to restart it: a service that waits for a broker which went away has no fresh heartbeat and is well. A service that
can't continue exits by itself.
"""

import importlib
import os
import socket
import sys
from collections.abc import Callable

import structlog

from broker.client import Broker
from broker.flow.owner import Owner
from broker.heartbeat import refuse_copy
from deploy.logs import configure_logging
from deploy.services.allocator import keep_freed_memory
from deploy.services.finished_run import FinishedRunWatch
from deploy.services.spot_notice import watch_spot_notices
from schemas.config import TidemillConfig
from schemas.errors import ConfigError
from schemas.run_record import claim_folder
from schemas.system.lifecycle import importing

FRESH_S = 15.0
DEADLINE_S = 5.0

log = structlog.get_logger()


def problem(config: TidemillConfig, name: str) -> str | None:
    """Return the problem of the service called ``name``; None if it is ready. InfraError: no broker."""
    age_s = Broker.connect(config, deadline_s=DEADLINE_S).heartbeats.read_age_s(name)
    if age_s is None:
        return f"{name} has not come up"
    return None if age_s <= FRESH_S else f"{name} has been silent for {age_s:.0f} s"


ROLES = {
    "control": "deploy.control_plane.server:run_control",
    "feeder": "producers.feeder:run_feeder",
    "generator": "producers.generator.service:run_generator",
    "reward": "consumers.reward.service:run_reward",
    "trainer": "consumers.trainer.service:run_trainer",
}
"""A role is a function (configuration, service name) that returns when its work is done or it was asked to end."""

SINGLE = frozenset({"control", "feeder", "trainer"})
"""Roles with one member; their service is named like the role."""


def command(*arguments: str) -> list[str]:
    """Return the command line of ``tidemill ARGUMENTS`` with this very Python.

    -P: the working folder is a user's, and a folder ``schemas`` or ``deploy`` there is not the package of that name.
    """
    return [sys.executable, "-P", "-m", "deploy.cli", *arguments]


def run_role(role: str, config: TidemillConfig, name: str | None, stay: bool = True) -> None:
    """Run until it ends; the errors of schemas/errors.py say why when it fails. stay: also when its run is finished."""
    keep_freed_memory()
    name = service_name(role, name, config.pool)
    configure_logging(config, role, name)
    if role == "trainer" and os.environ.get("RANK", "0") == "0":
        # Before the model is loaded, which takes long. One rank alone writes.
        owner = Owner.of(claim_folder(config).id, config.folder)
        refuse_copy(Broker.connect(config), owner, any_host=True)
    if not stay:
        watch = FinishedRunWatch(config)
        if watch.finished_before():
            text = "the run is finished, nothing to do: give it more trainer.steps, or --stay"
            log.info(text, run=config.run.name, steps=config.trainer.steps)
            return
        watch.start()
    watch_spot_notices(config)
    module, _, function = ROLES[role].partition(":")
    with importing():
        run: Callable[[TidemillConfig, str], None] = getattr(importlib.import_module(module), function)
    run(config, name)


def service_name(role: str, name: str | None = None, pool: str = "") -> str:
    """Return the name of this machine's service of a role, stable over restarts; ConfigError for an unknown role."""
    if role not in ROLES:
        raise ConfigError(f"unknown role {role!r}: one of {', '.join(sorted(ROLES))}")
    kind = f"{role}-{pool}" if pool else role
    return name or (role if role in SINGLE else f"{kind}-{socket.gethostname()}")
