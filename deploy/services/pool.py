"""The process of a pool's generator, with the pool's variables and interpreter and one of its units, on any machine."""

import errno
import hashlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence

from schemas.config import TidemillConfig
from schemas.errors import ConfigError, InfraError

ENTERED = "TIDEMILL_POOL"
"""Environment variable that names the pool whose variables and interpreter a process has already."""
UNIT_S = 30.0
"""How long a generator waits for a unit: one that was killed has it until all of its processes are gone."""
LOOK_S = 0.1
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def enter_pool(config: TidemillConfig, name: str | None) -> None:
    """Replace this process by one with the variables, interpreter and unit of the pool, unless it has them.

    The new process runs the same command and keeps the id, so it is still the child of the process that started this.
    ConfigError; InfraError if all units are taken.
    """
    pool = config.pools.get(name or "")
    if pool is None or not (pool.env or pool.python or pool.units) or os.environ.get(ENTERED) == name:
        return
    python = str(pool.python or sys.executable)
    given = {**pool.env, **(take_unit(str(name), pool.units) if pool.units else {})}
    environment = {**os.environ, **expand(given, os.environ), ENTERED: str(name)}
    try:
        os.execve(python, [python, "-P", "-m", "deploy.cli", *sys.argv[1:]], environment)
    except OSError as error:
        raise ConfigError(f"pools.{name}.python {python} cannot be started: {error.strerror}") from error


def take_unit(pool: str, units: Sequence[Mapping[str, str]]) -> Mapping[str, str]:
    """Return the variables of the first unit that no process of this machine has; wait for one. InfraError: all taken.

    A unit is taken by a name in Linux' abstract namespace, which no file outlives and which is of the machine, not of
    a user or a run. It stays taken until this process has ended, with the program that takes its place and all
    processes that it has forked.
    """
    deadline = time.monotonic() + UNIT_S
    while True:
        for unit in units:
            taken = socket.socket(socket.AF_UNIX)
            digest = hashlib.blake2b(json.dumps(sorted(unit.items())).encode(), digest_size=16).hexdigest()
            try:
                taken.bind(f"\0tidemill-unit-{digest}")
            except OSError as error:
                taken.close()
                if error.errno != errno.EADDRINUSE:
                    raise InfraError(f"pools.{pool}.units: no unit can be taken: {error.strerror}") from error
                continue
            os.set_inheritable(taken.detach(), True)
            return unit
        if time.monotonic() > deadline:
            raise InfraError(
                f"pools.{pool}.units: other generators of this machine have had all {len(units)} for {UNIT_S:.0f} s"
            )
        time.sleep(LOOK_S)


def expand(values: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """Return values in which $NAME and ${NAME} stand for these variables; what is not among them is empty."""
    return {
        name: VARIABLE.sub(lambda found: variables.get(found[1] or found[2], ""), value)
        for name, value in values.items()
    }
