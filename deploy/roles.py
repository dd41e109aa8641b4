"""One service in this process, as the supervisor, compose, Kubernetes and Slurm start it."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable

from deploy.logs import configure_logging
from schemas.config import TidemillConfig
from schemas.errors import ConfigError

ROLES = {
    "control": "broker.api.server:run_control",
    "feeder": "producers.feeder:run_feeder",
    "generator": "producers.generator.service:run_generator",
    "reward": "consumers.reward.service:run_reward",
    "trainer": "consumers.trainer.service:run_trainer",
}
"""A role is a function (configuration, service name) that returns when its work is done or it was asked to end."""

SINGLE = frozenset({"control", "feeder", "trainer"})
"""Roles with one member; their service is named like the role."""


def run_role(role: str, config: TidemillConfig, name: str | None) -> None:
    """Run until it ends; the errors of schemas/errors.py say why when it fails."""
    name = service_name(role, name)
    configure_logging(config, role, name)
    module, _, function = ROLES[role].partition(":")
    run: Callable[[TidemillConfig, str], None] = getattr(importlib.import_module(module), function)
    run(config, name)


def service_name(role: str, name: str | None = None) -> str:
    """The name of this machine's service of a role: stable over restarts, different on each machine.

    ConfigError for an unknown role.
    """
    if role not in ROLES:
        raise ConfigError(f"unknown role {role!r}: one of {', '.join(sorted(ROLES))}")
    return name or (role if role in SINGLE else f"{role}-{socket.gethostname().split('.')[0]}")
