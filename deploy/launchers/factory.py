"""From the configuration to a launcher; every mistake is one line that says what is allowed."""

from __future__ import annotations

import difflib
import inspect

from deploy.launchers import LAUNCHERS
from deploy.supervisor.services import Launcher
from schemas.config import LauncherConfig, TidemillConfig
from schemas.errors import ConfigError


def build_launcher(config: TidemillConfig) -> Launcher:
    """The launcher that ``config.launcher`` names; files are looked up beside the configuration. ConfigError."""
    wanted = config.launcher
    make = LAUNCHERS.get(wanted.name, config.base)
    if not callable(make) or not callable(getattr(make, "launch", None)):
        raise ConfigError(f"launcher {wanted.name!r} must be a class with a method launch(config, fresh)")
    _check_arguments(make, wanted)
    launcher: Launcher = make(**wanted.args)
    return launcher


def _check_arguments(make: type[Launcher], wanted: LauncherConfig) -> None:
    signature = inspect.signature(make)
    try:
        signature.bind(**wanted.args)
    except TypeError as error:
        names = [name for name, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD]
        unknown = next((name for name in wanted.args if name not in names), None)
        close = difflib.get_close_matches(unknown or "", names, n=1)
        hint = f", did you mean {close[0]!r}?" if close else f"; it takes {', '.join(names) or 'none'}"
        raise ConfigError(f"launcher.args of {wanted.name!r}: {error}{hint}") from error
