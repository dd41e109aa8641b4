"""Dead letters: messages that could not be processed, which people read, admit again, or drop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from broker.connection.connection import Connection
from schemas.codec import BadMessage, decode, encode
from schemas.errors import DataError
from schemas.messages import DeadLetter, Task

KEPT = 1000
"""The newest letters that are kept, up to 64 MiB of them (lua/prelude.lua); all are counted."""
LIMIT = 1 << 30
"""Bytes; a letter holds a message, and so may be larger than one."""

Requeued = Literal["ok", "active", "waiting", "ended"]
WORDS: dict[bytes, Requeued] = {b"ok": "ok", b"active": "active", b"waiting": "waiting"}


@dataclass(frozen=True)
class StoredLetter:
    """A dead letter with its entry id."""

    id: str
    letter: DeadLetter


class DeadLetters:
    """The newest dead letters of a run."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def list(self, count: int = KEPT) -> list[StoredLetter]:
        """List the newest ``count`` letters, oldest first."""
        found: Any = self._connection.run(
            "reading dead letters", lambda client: client.xrevrange(self._connection.keys.dead, count=count)
        )
        return [_filed(entry, fields) for entry, fields in reversed(found)]

    def get(self, id: str) -> StoredLetter:
        """Return a letter by its id; DataError when it is not there."""
        found: Any = self._connection.run(
            "reading a dead letter",
            lambda client: client.xrange(self._connection.keys.dead, id, id) if "-" in id else [],
        )
        if not found:
            raise DataError(f"there is no dead letter {id!r}: `tidemill dead-letters list` shows those that are kept")
        return _filed(*found[0])

    def requeue(self, id: str) -> Requeued:
        """Admit the letter's whole prompt group again, before all others.

        ``ended``: it is not among the groups that failed; it went on without this sample, or the broker was
        mended since. ``active``: it is in the pipeline. ``waiting``: it is to be admitted again anyway.
        DataError when the letter is gone or names no training task.
        """
        filed = self.get(id)
        if filed.letter.task_id < 0 or filed.letter.task_id >= 1 << 32:
            raise DataError(f"dead letter {id} belongs to no training prompt, it can only be dropped")
        answer: bytes = self._connection.run_script("requeue_group", id, filed.letter.task_id)
        return WORDS.get(answer, "ended")

    def drop(self, id: str) -> None:
        """Delete a letter; DataError when it is not there."""
        self.get(id)
        self._connection.run("dropping a dead letter", lambda client: client.xdel(self._connection.keys.dead, id))


def letter_bytes(letter: DeadLetter, max_bytes: int) -> bytes:
    """The letter on the wire. It is never too large to be sent: of a payload over ``max_bytes`` the head is kept."""
    kept = msgspec.structs.replace(letter, payload=letter.payload[:max_bytes])
    return encode(kept, LIMIT)


def body_or_letter(task: Task, max_bytes: int) -> tuple[bytes, bytes]:
    """A task on the wire, and b""; or b"" and the dead letter of one that is too large to be sent."""
    try:
        return encode(task, max_bytes), b""
    except BadMessage as error:
        letter = DeadLetter(source="feeder", reason=str(error), deliveries=0, payload=b"", task_id=task.task_id)
        return b"", letter_bytes(letter, max_bytes)


def _filed(entry: bytes, fields: dict[bytes, bytes]) -> StoredLetter:
    return StoredLetter(entry.decode(), decode(fields[b"b"], DeadLetter, LIMIT))
