"""The owner of a name on a server: one run, identified by a random id (schemas/run_record.py).

A run takes its name before its services start, and each trainer takes it again, in case the broker lost it.
"""

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from broker.connection.connection import Connection, RunData
from schemas.errors import ConfigError
from schemas.urls import hide_password


@dataclass(frozen=True)
class Owner:
    """The identity of a run. since: when its first attempt began, Unix seconds; 0 if unknown."""

    id: str
    folder: str
    host: str
    since: float = 0.0

    @classmethod
    def of(cls, id: str, folder: Path) -> Self:
        """Describe this run, whose folder is on this machine."""
        return cls(id, str(folder), socket.gethostname())

    @classmethod
    def parse(cls, fields: Sequence[bytes | None]) -> Self:
        """Parse a script's reply."""
        id, folder, host, since = ((field or b"").decode() for field in fields)
        return cls(id, folder, host, float(since or 0))

    def is_beside(self, other: Self) -> bool:
        """Return whether both runs have the same folder, where only one of them can still be."""
        return (self.folder, self.host) == (other.folder, other.host)


NO_OWNER = Owner("", "", "")


class RunOwner(RunData):
    """Reads and takes the name of the run."""

    def read(self) -> Owner | None:
        """Return the run that has the name, None if no run has it."""
        fields = ("run_id", "run_folder", "run_host", "run_since")
        found = self._connection.run_command("looking for the run", "hmget", self._keys.ctl, *fields)
        return Owner.parse(found) if found[0] else None

    def refuse_other(self, owner: Owner, forget: bool = False) -> None:
        """Raise ConfigError if another run has the name.

        forget: accept a run that began in the same folder, because it is about to be deleted.
        """
        other = self.read()
        if other is not None and other.id != owner.id and not (forget and other.is_beside(owner)):
            raise name_taken(self._connection, owner, other)

    def claim(self, owner: Owner) -> None:
        """Take the name for this run, whose services start now; ConfigError if another run has it."""
        answer = self._connection.run_script("claim_run", owner.id, owner.folder, owner.host)
        if answer != b"ok":
            raise name_taken(self._connection, owner, Owner.parse(answer))


def name_taken(connection: Connection, owner: Owner, other: Owner) -> ConfigError:
    """Return the error for a run whose name another run has on this server: which one, and what to do."""
    since = time.strftime(" since %Y-%m-%d %H:%M", time.localtime(other.since)) if other.since else ""
    run, url = connection.keys.run, hide_password(connection.url)
    if owner.is_beside(other):
        return ConfigError(
            f"the broker at {url} holds the run {run!r} that is in {other.folder}{since}, where checkpoints/RUN.json is"
            " gone: restore the folder's checkpoints, or start over with --fresh"
        )
    return ConfigError(
        f"the name {run!r} is taken at {url} by the run in {other.folder} on {other.host}{since}, which is not the one"
        " in this folder: give this run another run.name, or delete what that one left in the broker with"
        f" `tidemill purge {run}`"
    )
