"""What a launcher is: it turns the description of a service into something that runs, wherever that is.

The supervisor does the rest for all of them: restarts, scaling, the orderly end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from deploy.process import Exit

if TYPE_CHECKING:
    from deploy.snapshot import RunSnapshot
    from deploy.supervisor import Supervisor


class Running(Protocol):
    """One service that was started. None of these calls may block."""

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
        """How it ended; None while anything of it runs."""

    def terminate(self) -> None:
        """Ask it to end."""

    def kill(self) -> None:
        """Kill it and everything that it started."""


class Launcher(Protocol):
    """Starts services of a run. ``role`` says what a service is for; its log is a path that this process can write."""

    def start(
        self, argv: Sequence[str], name: str, role: str, log: Path | None, environment: Mapping[str, str], mark: str
    ) -> Running:
        """Start it; returns at once, InfraError if that can't be. mark: tells processes of this run from others."""

    def tick(self, supervisor: Supervisor, snapshot: RunSnapshot | None) -> None:
        """Called several times a second: a place to scale. ``snapshot`` is the newest look at the run, if any."""
