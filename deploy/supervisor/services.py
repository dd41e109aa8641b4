"""What a launcher is: it starts a run on one engine, and is chosen by name or dotted path.

An engine with a queue of its own, such as Slurm, is handed the whole run. One that only places processes is a
``Starter`` as well: the supervisor does the rest for it, which is restarts, scaling and the orderly end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from deploy.supervisor.process import Exit
from schemas.config import TidemillConfig

if TYPE_CHECKING:
    from deploy.supervisor.supervisor import Supervisor
    from deploy.terminal.snapshot import RunSnapshot


class Launcher(Protocol):
    """Made of ``launcher.args``: the parameters of its constructor are its options, ConfigError if they can't be."""

    def launch(self, config: TidemillConfig, fresh: bool = False) -> int:
        """Start the run or go on with it; returns the exit code when it is over, or is the engine's own business.

        fresh: delete what an earlier run of this name left, first. ConfigError, InfraError.
        """


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


class Starter(Protocol):
    """Starts services of a run. ``role`` says what a service is for; its log is a path that this process can write."""

    def start(
        self, argv: Sequence[str], name: str, role: str, log: Path | None, environment: Mapping[str, str], mark: str
    ) -> Running:
        """Start it; returns at once, InfraError if that can't be. mark: tells processes of this run from others."""

    def tick(self, supervisor: Supervisor, snapshot: RunSnapshot | None) -> None:
        """Called several times a second: a place to scale. ``snapshot`` is the newest look at the run, if any."""
