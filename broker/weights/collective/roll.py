"""The roll call of a version: the broker's scripts decide, by its clock, which generators take part in the broadcast.

A process that waits for a roll or a note blocks in the broker, which wakes it when one of them changes.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from broker.connection.connection import BLOCK_MS, Connection, RunData
from broker.flow.fencing import accepted, run_fenced
from broker.weights.collective.protocol import Membership

GRACE_S = 1.0
"""How long after its deadline a roll that is still open is abandoned, because its trainer is gone."""


class RollCall(RunData):
    """The roll calls of a run, for the trainer or one member. InfraError if the broker does not answer."""

    def __init__(self, connection: Connection, member: str) -> None:
        super().__init__(connection)
        self._member = member

    def open(self, leader_term: str, payload: str, backend: str, roll_s: float) -> None:
        """Open a roll for ``roll_s`` seconds to readers of the payload. FencedError once another trainer took over."""
        run_fenced(self._connection, "open_roll", leader_term, payload, backend, int(roll_s * 1000))

    def close(self, leader_term: str, payload: str, communicator: int, roll_s: float) -> Membership | None:
        """Wait until all known members have answered, at most ``roll_s``; return rank 0, or None without members.

        communicator: number of the one that the trainer holds, 0 for none.
        """
        deadline = time.monotonic() + roll_s + GRACE_S
        while time.monotonic() < deadline:
            position = self._position(self._keys.roll_answers)
            found = self._connection.run_script("close_roll", leader_term, payload, communicator, once=True)
            if not isinstance(accepted(self._connection, found, leader_term), int):
                number, size, backend = found
                return Membership(int(number), 0, int(size), _text(backend)) if int(size) > 1 else None
            self._wait_change(self._keys.roll_answers, position, found / 1000)
        return None

    def answer(
        self, payload: str, communicator: int, backends: Sequence[str], given_up: Callable[[], bool]
    ) -> Membership | None:
        """Answer the roll call for a payload, if it is open, and wait until it is closed; None if not on the roll.

        communicator: number of the one that this member holds, 0 for none. backends: those that it has; the trainer
        does not wait for a member without any. given_up: whether to stop waiting.
        """
        deadline: float | None = None
        while not given_up():
            position = self._position(self._keys.roll_changes)
            found = self._connection.run_script(
                "answer_roll", self._member, payload, communicator, " ".join(backends), once=True
            )
            if not isinstance(found, int):
                if found is None and given_up():
                    # The thread that closes us may have left the roll just before this answer joined the next one.
                    break
                if found is None:
                    return None
                number, rank, size, backend = found
                return Membership(int(number), int(rank), int(size), _text(backend))
            deadline = deadline or time.monotonic() + found / 1000 + GRACE_S
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            self._wait_change(self._keys.roll_changes, position, left_s)
        self.leave()
        return None

    def leave(self) -> None:
        """Leave the rolls, so that no trainer waits for this member."""
        self._connection.run_script("answer_roll", self._member, "", 0, "", once=True)

    def tell(self, communicator: int, key: str, note: bytes) -> None:
        """Leave a note for the ranks of this communicator."""
        self._connection.run_script("meet", communicator, key, note, once=True)

    def find_note(self, communicator: int, key: str, deadline: float) -> bytes:
        """Wait for the note of this key until ``deadline`` (monotonic seconds); b"" if there is none."""
        while (left_s := deadline - time.monotonic()) > 0:
            position = self._position(self._keys.roll_changes)
            found: list[bytes] = self._connection.run_script("meet", communicator, "", "", once=True)
            notes: dict[bytes, bytes] = dict(zip(found[::2], found[1::2], strict=True))
            if (note := notes.get(key.encode())) is not None:
                return note
            self._wait_change(self._keys.roll_changes, position, left_s)
        return b""

    def _position(self, key: str) -> bytes:
        return self._connection.newest_entry("looking for a roll", key, once=True)

    def _wait_change(self, key: str, position: bytes, timeout_s: float) -> None:
        """Wait for an entry after ``position``, at most until the timeout or BLOCK_MS."""
        block_ms = max(1, min(BLOCK_MS, math.ceil(1000 * timeout_s)))
        self._connection.run_command("waiting for a roll", "xread", {key: position}, 1, block_ms, once=True)


def _text(answer: Any) -> str:
    return answer.decode() if isinstance(answer, bytes) else str(answer)
