"""One service in this process, as the supervisor, compose, Kubernetes and Slurm start it."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable

from deploy.logs import configure_logging
from schemas.config import TidemillConfig

ROLES = {
    "feeder": "producers.feeder:run_feeder",
    "generator": "producers.generator.service:run_generator",
    "reward": "consumers.reward.service:run_reward",
    "trainer": "consumers.trainer.loop:run_trainer",
}
"""A role is a function (configuration, service name) that returns when its work is done or it was asked to end."""

SINGLE = frozenset({"feeder", "trainer"})
"""Roles with one member; their service is named like the role."""


def run_role(role: str, config: TidemillConfig, name: str | None) -> None:
    """Run until it ends; the errors of schemas/errors.py say why when it fails."""
    if name is None:
        # Stable over restarts on one machine, different on each.
        name = role if role in SINGLE else f"{role}-{socket.gethostname().split('.')[0]}"
    configure_logging(config, role, name)
    module, _, function = ROLES[role].partition(":")
    run: Callable[[TidemillConfig, str], None] = getattr(importlib.import_module(module), function)
    run(config, name)
