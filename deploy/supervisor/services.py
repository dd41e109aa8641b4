"""Services as the supervisor knows them: specification, running handle, exit, and the starter that starts them.

Where services run is a ``Starter``'s business: this machine (deploy/supervisor/process.py), Ray
(deploy/launchers/ray.py), or a user's own. Restarts, scaling and the orderly end are the supervisor's.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from schemas.control_api import RunStatus


@dataclass(frozen=True)
class ServiceSpec:
    """A service that is to run.

    essential: the run is over when it fails for good; else when the last replica of its role does.
    optional: the run goes on without it. finishes: its exit code 0 means that the run is done.
    stop_order: lower ones are stopped earlier, higher ones are started earlier.
    shared_output: it writes to this process's own output, not to a log.
    """

    name: str
    argv: Sequence[str]
    role: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    essential: bool = True
    optional: bool = False
    finishes: bool = False
    stop_order: int = 0
    shared_output: bool = False


@dataclass(frozen=True)
class Change:
    """An event in a service's life, for people. ends_run: it is told as the cause of the run's end."""

    service: str
    text: str
    level: Literal["info", "warning", "error"] = "info"
    ends_run: bool = False


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
    """The handle of a service that was started. None of these calls may block."""

    @property
    def pid(self) -> int | None:
        """Its process id on this machine, None if it runs elsewhere or not yet."""

    @property
    def guard_pid(self) -> int:
        """Process id of its guardian on this machine, 0 if there is none."""

    @property
    def orphaned(self) -> bool:
        """Whether what it started may be left on this machine, for the supervisor to find."""

    def poll(self) -> Exit | None:
        """Exit of the service; None while anything of it runs."""

    def terminate(self) -> None:
        """Ask it to end."""

    def kill(self) -> None:
        """Kill it and everything that it started."""


class Scaler(Protocol):
    """The part of the supervisor that a starter may call to change how many replicas there are."""

    def scale(self, role: str, count: int) -> None:
        """Start or stop replicas of a role until ``count`` of them live; ConfigError if that can't be."""

    def replicas(self, role: str) -> int:
        """Number of services of a role that live, or are about to be started again."""


class Starter(Protocol):
    """Starts services of a run. ``role`` says what a service is for; its log is a path that this process can write."""

    def start(
        self, argv: Sequence[str], name: str, role: str, log: Path | None, environment: Mapping[str, str], mark: str
    ) -> RunningService:
        """Start it; returns at once, InfraError if that can't be. mark: tells processes of this run from others."""

    def tick(self, scaler: Scaler, status: RunStatus | None) -> None:
        """Called several times a second: a place to scale. ``status`` is the newest look at the run, if any."""
