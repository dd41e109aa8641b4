"""The process of a pool's generator, with the pool's variables and interpreter, on whichever machine it is started."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping

from schemas.config import TidemillConfig
from schemas.errors import ConfigError

ENTERED = "TIDEMILL_POOL"
"""Environment variable that names the pool whose variables and interpreter a process has already."""
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def enter_pool(config: TidemillConfig, name: str | None) -> None:
    """Replace this process by one with the variables and the interpreter of the pool, unless it has them. ConfigError.

    The new process runs the same command and keeps the id, so it is still the child of the process that started this.
    """
    pool = config.pools.get(name or "")
    if pool is None or not (pool.env or pool.python) or os.environ.get(ENTERED) == name:
        return
    python = str(pool.python or sys.executable)
    environment = {**os.environ, **expand(pool.env, os.environ), ENTERED: str(name)}
    try:
        os.execve(python, [python, "-P", "-m", "deploy.cli", *sys.argv[1:]], environment)
    except OSError as error:
        raise ConfigError(f"pools.{name}.python {python} cannot be started: {error.strerror}") from error


def expand(values: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """Return values in which $NAME and ${NAME} stand for these variables; what is not among them is empty."""
    return {
        name: VARIABLE.sub(lambda found: variables.get(found[1] or found[2], ""), value)
        for name, value in values.items()
    }
