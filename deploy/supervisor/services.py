"""Services as the supervisor knows them: specification, running handle, exit, and the starter that starts them.

A ``Starter`` decides where services run: on this machine (deploy/supervisor/process.py), on Ray
(deploy/launchers/ray.py), or elsewhere (a user's own). The supervisor restarts, scales and stops them.
"""

import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from deploy.logs import lossy
from schemas.control_api.orders import scaled_role
from schemas.control_api.status import RunStatus


@dataclass(frozen=True)
class ServiceSpec:
    """The specification of a service.

    essential: the run fails if the service fails permanently; otherwise if the last replica of its role does.
    optional: the run continues without the service. finishes: exit code 0 means that the run is finished.
    stop_order: services with lower numbers stop earlier. shared_output: no log, but the output of this process.
    """

    name: str
    argv: Sequence[str]
    role: str = ""
    pool: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    essential: bool = True
    optional: bool = False
    finishes: bool = False
    stop_order: int = 0
    shared_output: bool = False

    @property
    def scaled_as(self) -> str:
        """What an order to scale calls it: its role, and its pool after a dot."""
        return scaled_role(self.role, self.pool)


@dataclass(frozen=True)
class Change:
    """A change of a service, for display. ends_run: it is reported as the reason why the run ended."""

    service: str
    text: str
    level: Literal["info", "warning", "error"] = "info"
    ends_run: bool = False

    def print(self) -> None:
        """Print it to stderr."""
        print(f"{self.service}: {self.text}", file=lossy(sys.stderr))


@dataclass(frozen=True)
class Exit:
    """The end of a process: its exit code, negative for a signal."""

    code: int

    def __str__(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        return f"killed by {name}"


class RunningService(Protocol):
    """The handle of a started service. No method may block."""

    @property
    def pid(self) -> int | None:
        """Process id on this machine, None if the service runs elsewhere or not yet."""

    @property
    def guard_pid(self) -> int:
        """Process id of the guardian on this machine; 0 without one."""

    @property
    def orphaned(self) -> bool:
        """Whether processes that it started may be left on this machine, for the supervisor to find."""

    def poll(self) -> Exit | None:
        """Return the exit of the service, None while any of its processes runs."""

    def terminate(self) -> None:
        """Ask the service to end."""

    def kill(self) -> None:
        """Kill the service and all processes that it started."""


class Scaler(Protocol):
    """The part of the supervisor that a starter may call to change the number of replicas."""

    def scale(self, role: str, count: int) -> None:
        """Start or stop replicas of a role until ``count`` of them live. Raises ConfigError for another role."""

    def replicas(self, role: str) -> int:
        """Return the number of services of a role that run or are about to be restarted."""


class Starter(Protocol):
    """Starts the services of a run. ``role``: the service's role. ``log``: a path that this process can write."""

    def start(
        self, argv: Sequence[str], name: str, role: str, log: Path | None, environment: Mapping[str, str], mark: str
    ) -> RunningService:
        """Start a service and return at once. mark: identifies processes of this run. Raises InfraError."""

    def tick(self, scaler: Scaler, status: RunStatus | None) -> None:
        """Called several times a second, for scaling. ``status``: the newest status of the run, if any."""
