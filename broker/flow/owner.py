"""The owner of a run's name on a server: one run, known by its random identity (schemas/run_record.py).

A run's name is taken when its services are about to start, and again by each trainer, for a broker that forgot it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from broker.connection.connection import Connection
from schemas.errors import ConfigError
from schemas.urls import hide_password


@dataclass(frozen=True)
class Owner:
    """A run as others see it. since: when its first attempt began, Unix seconds; 0 if that is not known."""

    id: str
    folder: str
    host: str
    since: float = 0.0

    @classmethod
    def of(cls, id: str, folder: Path) -> Owner:
        """This run, whose folder is on this machine."""
        return cls(id, str(folder), socket.gethostname())

    @classmethod
    def parse(cls, fields: Sequence[bytes | None]) -> Owner:
        """Parse a script's answer."""
        id, folder, host, since = ((field or b"").decode() for field in fields)
        return cls(id, folder, host, float(since or 0))

    def is_beside(self, other: Owner) -> bool:
        """Whether both are in one folder, of which only one can be there now."""
        return (self.folder, self.host) == (other.folder, other.host)


NOBODY = Owner("", "", "")


class RunOwner:
    """Takes the run's name, and says who has it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def read(self) -> Owner | None:
        """The run that has the name; None when there is none."""
        keys = self._connection.keys
        fields = ("run_id", "run_folder", "run_host", "run_since")
        found = self._connection.run("looking for the run", lambda client: client.hmget(keys.ctl, *fields))
        return Owner.parse(found) if found[0] else None

    def refuse_other(self, owner: Owner, forget: bool = False) -> None:
        """Raise ConfigError when another run than this one has the name.

        forget: whether one that began in the same folder, and is there no more, is about to be forgotten.
        """
        other = self.read()
        if other is not None and other.id != owner.id and not (forget and other.is_beside(owner)):
            raise name_taken(self._connection, owner, other)

    def claim(self, owner: Owner) -> None:
        """Take the name for this run, whose services start now; ConfigError when another run has it."""
        answer = self._connection.run_script("claim_run", owner.id, owner.folder, owner.host)
        if answer != b"ok":
            raise name_taken(self._connection, owner, Owner.parse(answer))


def name_taken(connection: Connection, owner: Owner, other: Owner) -> ConfigError:
    """The error for a run whose name another one has on this server: who, and what to do."""
    since = time.strftime(" since %Y-%m-%d %H:%M", time.localtime(other.since)) if other.since else ""
    run, url = connection.keys.run, hide_password(connection.url)
    if owner.is_beside(other):
        return ConfigError(
            f"the broker at {url} holds the run {run!r} that is in {other.folder}{since}, where checkpoints/RUN.json is"
            " gone: restore the folder's checkpoints, or start anew with --fresh"
        )
    return ConfigError(
        f"the name {run!r} is taken at {url} by the run in {other.folder} on {other.host}{since}, which is not the one"
        " in this folder: give this run another run.name, or delete what that one left in the broker with"
        f" `tidemill purge {run}`"
    )
