"""The protocol of a launcher, and how the configuration names one; every mistake is one line that says what is allowed.

A launcher starts a run on one engine. An engine with a queue of its own, such as Slurm, is handed the whole run. One
that only places processes is a ``Starter`` as well (deploy/supervisor/services.py), and the supervisor does the rest.
"""

import difflib
import inspect
from typing import Protocol

from deploy.launchers import LAUNCHERS
from schemas.config import PoolConfig, TidemillConfig
from schemas.errors import ConfigError
from schemas.urls import hide_password


class Launcher(Protocol):
    """A way to start a run. The parameters of its constructor are ``launcher.args``; ConfigError if they can't be."""

    def launch(self, config: TidemillConfig, fresh: bool = False) -> int:
        """Start or resume the run; return the exit code when it has ended, or when another scheduler has taken it over.

        fresh: first delete the earlier run of this name. ConfigError, InfraError.
        """


def build_launcher(config: TidemillConfig) -> Launcher:
    """Return the launcher that ``config.launcher`` names; files are looked up beside the configuration. ConfigError."""
    wanted = config.launcher
    make = LAUNCHERS.get(wanted.name, config.base)
    if not callable(make) or not callable(getattr(make, "launch", None)):
        raise ConfigError(f"launcher {wanted.name!r} must be a class with a method launch(config, fresh)")
    signature = inspect.signature(make)
    try:
        signature.bind(**wanted.args)
    except TypeError as error:
        names = [name for name, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD]
        unknown = next((name for name in wanted.args if name not in names), None)
        close = difflib.get_close_matches(unknown or "", names, n=1)
        hint = f", did you mean {close[0]!r}?" if close else f"; it takes {', '.join(names) or 'none'}"
        raise ConfigError(f"launcher.args of {wanted.name!r}: {error}{hint}") from error
    launcher: Launcher = make(**wanted.args)
    return launcher


def check_places(config: TidemillConfig, launcher: str, replicas: int | None = None) -> None:
    """Raise ConfigError if this launcher can't place services as configured, or pools have ``replicas`` beside them."""
    if config.placement is not None and config.placement.is_auto:
        raise ConfigError(f"placement auto is for `tidemill up`: name the GPUs, or remove it, {launcher} finds them")
    for name, pool in config.pools.items():
        if pool.nodes:
            raise ConfigError(
                f"pools.{name}.nodes is for launcher.name local and `tidemill node`: remove it, {launcher} finds the"
                " machines"
            )
    if config.pools and replicas is not None:
        raise ConfigError(f"--generators {replicas} excludes pools: set pools.NAME.generator.replicas")


def check_own_broker(config: TidemillConfig, launcher: str) -> None:
    """Raise ConfigError if services would use another server than the one that this launcher starts for them."""
    if config.broker.url is not None:
        raise ConfigError(
            f"broker.url {hide_password(config.broker.url)} excludes the run's own broker, which {launcher} starts:"
            " remove it, or add --no-broker"
        )


def check_whole(options: object, config: TidemillConfig, of_pool: str, *names: str) -> None:
    """Raise ConfigError if one of these options, or a pool's ``of_pool``, is set in a run with ``placement``."""
    given = {f"--{name.replace('_', '-')}": (getattr(options, name), getattr(type(options), name)) for name in names}
    for name, pool in config.pools.items():
        given[f"pools.{name}.{of_pool}"] = (getattr(pool, of_pool), getattr(PoolConfig(), of_pool))
    for name, (value, default) in given.items():
        if value != default:
            raise ConfigError(f"{name} {value} excludes placement, with which one node has the whole run")
