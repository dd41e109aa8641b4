"""Dead letters: messages that could not be processed, which people read, admit again, or drop."""

from __future__ import annotations

import builtins
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from broker.connection.connection import Connection
from broker.connection.stream_pages import read_page
from schemas.codec import BadMessage, decode, encode
from schemas.errors import DataError, printable
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

    def page(self, count: int, cursor: str | None, newest: bool) -> tuple[builtins.list[StoredLetter], str | None]:
        """A page of letters, from the oldest on or from the newest back, and the cursor of the following one."""
        found, following = read_page(
            self._connection, self._connection.keys.dead, "dead letters", count, cursor, newest
        )
        return [_filed(entry, fields) for entry, fields in found], following

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


@dataclass(frozen=True)
class UnusableTask:
    """A prompt group that no task can be made for: it fails as it comes in.

    n: samples that it would have had. dataset: label of the dataset that its prompt is from.
    """

    task_id: int
    n: int
    reason: str
    dataset: str = ""


def letter_bytes(letter: DeadLetter, max_bytes: int) -> bytes:
    """The letter on the wire. It can always be sent: of a payload over ``max_bytes`` the head is kept."""
    kept = msgspec.structs.replace(letter, payload=letter.payload[:max_bytes], reason=printable(letter.reason))
    return encode(kept, LIMIT)


def check_sendable(task: Task | UnusableTask, max_bytes: int) -> tuple[bytes, UnusableTask | None]:
    """A task on the wire, and None; or b"" and why there is none: it can't be encoded, or it is too large."""
    if isinstance(task, UnusableTask):
        return b"", task
    try:
        return encode(task, max_bytes), None
    except BadMessage as error:
        return b"", UnusableTask(task.task_id, task.n, str(error), task.dataset)


def letter_of(task: UnusableTask | None, max_bytes: int) -> bytes:
    """The dead letter of a prompt group that fails as it comes in; b"" for None."""
    if task is None:
        return b""
    letter = DeadLetter(source="feeder", reason=task.reason, deliveries=0, payload=b"", task_id=task.task_id)
    return letter_bytes(letter, max_bytes)


def _filed(entry: bytes, fields: dict[bytes, bytes]) -> StoredLetter:
    """Return an entry of the stream; one that is no letter is shown as such, so that people can look and drop it."""
    body = fields.get(b"b", b"")
    try:
        letter = decode(body, DeadLetter, LIMIT)
    except BadMessage as error:
        letter = DeadLetter(
            source="unreadable", reason=f"this letter cannot be read: {error}", deliveries=0, payload=body
        )
    return StoredLetter(entry.decode(), letter)
