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

    def refuse_other(self, id: str) -> None:
        """Raise ConfigError when another run than the one with this identity has the name."""
        other = self.read()
        if other is not None and other.id != id:
            raise name_taken(self._connection, other)

    def claim(self, owner: Owner) -> None:
        """Take the name for this run, whose services start now; ConfigError when another run has it."""
        answer = self._connection.run_script("claim_run", owner.id, owner.folder, owner.host)
        if answer != b"ok":
            raise name_taken(self._connection, Owner.parse(answer))


def name_taken(connection: Connection, other: Owner) -> ConfigError:
    """The error for a run whose name another one has on this server: who, and what to do."""
    since = time.strftime(" since %Y-%m-%d %H:%M", time.localtime(other.since)) if other.since else ""
    run = connection.keys.run
    return ConfigError(
        f"the name {run!r} is taken at {hide_password(connection.url)} by the run in {other.folder} on"
        f" {other.host}{since}, which is not the one in this folder: give this run another run.name, or delete what"
        f" that one left in the broker with `tidemill purge {run}`"
    )
