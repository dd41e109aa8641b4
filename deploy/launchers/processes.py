"""Services as processes of this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.process import Process

if TYPE_CHECKING:
    from deploy.snapshot import RunSnapshot
    from deploy.supervisor import Supervisor


class Processes:
    """The starter of ``tidemill up``, and one to build others on: what ``start`` runs may be a way to elsewhere."""

    def start(
        self, argv: Sequence[str], name: str, role: str, log: Path | None, environment: Mapping[str, str], mark: str
    ) -> Process:
        return Process(argv, name, log=log, environment=environment, mark=mark)

    def tick(self, supervisor: Supervisor, snapshot: RunSnapshot | None) -> None:
        """One machine has what it has."""
