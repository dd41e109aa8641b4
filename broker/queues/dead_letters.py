"""Dead letters: messages that could not be processed, which users read, requeue or drop."""

from dataclasses import dataclass
from typing import Literal

import msgspec

from broker.connection.connection import RunData
from broker.connection.stream_pages import read_page
from schemas.codec import BadMessage, decode, encode
from schemas.errors import DataError, RefusedError, printable
from schemas.messages import DeadLetter, Task

KEPT = 1000
"""Number of the newest letters that are kept, up to 64 MiB in all (lua/prelude.lua); all are counted."""
LIMIT = 1 << 30
"""Most bytes of a letter, which holds a message and so may be larger than one."""

Requeued = Literal["ok", "active", "waiting", "ended"]
WORDS: dict[bytes, Requeued] = {b"ok": "ok", b"active": "active", b"waiting": "waiting"}


@dataclass(frozen=True)
class StoredLetter:
    """A dead letter with its entry id."""

    id: str
    letter: DeadLetter


class DeadLetterStore(RunData):
    """The newest dead letters of a run."""

    def page(self, count: int, cursor: str | None, newest: bool) -> tuple[list[StoredLetter], str | None]:
        """Return a page of letters, from the oldest on or from the newest back, and the cursor of the next page."""
        entries, following = read_page(self._connection, self._keys.dead, "dead letters", count, cursor, newest)
        return [_stored(entry, fields) for entry, fields in entries], following

    def get(self, id: str) -> StoredLetter:
        """Return a letter by its id; DataError if it does not exist."""
        entries = "-" in id and self._connection.run_command("reading a dead letter", "xrange", self._keys.dead, id, id)
        if not entries:
            raise DataError(f"there is no dead letter {id!r}: `tidemill dead-letters list` shows those that are kept")
        return _stored(*entries[0])

    def requeue(self, id: str) -> Requeued:
        """Admit the letter's whole prompt group again, before all others.

        ``ended``: it is not among the failed groups, because it continued without this sample or the broker was
        repaired in between. ``active``: it is in the pipeline. ``waiting``: it will be admitted again anyway. DataError
        if the letter is gone, RefusedError if it names no training task.
        """
        task_id = self.get(id).letter.task_id
        if task_id < 0 or task_id >= 1 << 32:
            raise RefusedError(f"dead letter {id} belongs to no training prompt, it can only be dropped")
        answer: bytes = self._connection.run_script("requeue_group", id, task_id)
        return WORDS.get(answer, "ended")

    def drop(self, id: str) -> None:
        """Delete a letter; DataError if it does not exist."""
        self.get(id)
        self._connection.run_command("dropping a dead letter", "xdel", self._keys.dead, id)


@dataclass(frozen=True)
class UnusableTask:
    """A prompt group whose task can't be made, so that it fails as soon as it is admitted.

    n: samples that it would have had. dataset: label of its prompt's dataset.
    """

    task_id: int
    n: int
    reason: str
    dataset: str = ""


def letter_bytes(letter: DeadLetter, max_bytes: int) -> bytes:
    """Encode a letter. Its payload is cut at ``max_bytes``, so that it can always be sent."""
    kept = msgspec.structs.replace(letter, payload=letter.payload[:max_bytes], reason=printable(letter.reason))
    return encode(kept, LIMIT)


def check_sendable(task: Task | UnusableTask, max_bytes: int) -> tuple[bytes, UnusableTask | None, bytes]:
    """Return the encoded task, None and b""; for an unusable task, b"", the UnusableTask and its encoded dead letter.

    A task that can't be encoded or is too large is unusable, too.
    """
    if isinstance(task, Task):
        try:
            return encode(task, max_bytes), None, b""
        except BadMessage as error:
            task = UnusableTask(task.task_id, task.n, str(error), task.dataset)
    letter = DeadLetter(source="feeder", reason=task.reason, deliveries=0, payload=b"", task_id=task.task_id)
    return b"", task, letter_bytes(letter, max_bytes)


def _stored(entry: bytes, fields: dict[bytes, bytes]) -> StoredLetter:
    """Decode an entry; one that is not a letter becomes a letter about it, so that users can read and drop it."""
    body = fields.get(b"b", b"")
    try:
        letter = decode(body, DeadLetter, LIMIT)
    except BadMessage as error:
        letter = DeadLetter(
            source="unreadable", reason=f"this letter cannot be read: {error}", deliveries=0, payload=body
        )
    return StoredLetter(entry.decode(), letter)
