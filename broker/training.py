"""The trainer's end of the broker: claim, journal, step, commit, all fenced by its epoch.

Exactly once: what a step trains on is fixed in the journal before it; slots return at
the step; entries are acknowledged only when a durable checkpoint covers them. After a
crash the next trainer finds the same entries and the same records.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis

from broker.keys import TRAINER
from broker.link import BLOCK_MS, Link
from broker.queues import Entry, ensure_group, number
from schemas.codec import BadMessage, decode, encode
from schemas.errors import FencedError
from schemas.messages import BatchRecord, Score, Trajectory


@dataclass(frozen=True)
class Outcome:
    """One sample's outcome as the trainer reads it.

    trajectory_id is None when the sample failed; ``excluded`` when it had been published and its reward failed.
    """

    scored_id: bytes
    task_id: int
    sample: int
    group_size: int
    trajectory_id: bytes | None
    score: Score
    excluded: bool = False


@dataclass(frozen=True)
class Slot:
    """A group in the pipeline; ``sequence`` counts admissions."""

    task_id: int
    sequence: int


@dataclass(frozen=True)
class Takeover:
    """What the broker knew when this trainer took over."""

    epoch: str
    step: int
    version: int


class Training:
    """Used by one trainer process; FencedError everywhere once a newer one took over."""

    def __init__(self, link: Link, max_bytes: int) -> None:
        self._link = link
        self._max_bytes = max_bytes
        self._epoch = ""
        self._losses = -1
        self._seen: set[bytes] = set()

    def begin(
        self, *, epoch_floor: int, step: int, version: int, cursor: int, slots: int, total: int, trained: int
    ) -> Takeover:
        """Take the run over. The arguments are what the checkpoint knows, used where the broker knows nothing."""
        for stream, group in self._link.keys.groups_of_streams:
            ensure_group(self._link, stream, group)
        nonce = secrets.token_hex(4)
        epoch, known_step, known_version = self._link.script(
            "begin", epoch_floor, nonce, step, version, cursor, slots, total, trained
        )
        self._epoch = epoch.decode()
        return Takeover(self._epoch, int(known_step), int(known_version))

    def claim(self, count: int) -> list[Outcome]:
        """Outcomes that this trainer has not seen yet, without waiting. First all that is left from before."""
        if self._losses != self._link.losses:
            self._losses = self._link.losses
            recovered = self._recover(count)
            if recovered:
                return self._parse(recovered)
        return self._parse(self._fenced(self._link.script("claim", self._epoch, count)))

    def wait(self, timeout_ms: int = BLOCK_MS) -> None:
        """Return when a new outcome may be there, at the latest after the timeout."""
        keys = self._link.keys

        def last_delivered(client: redis.Redis) -> bytes:
            info: Any = client.xinfo_groups(keys.scored)
            for group in info:
                if group["name"] == TRAINER.encode():
                    return bytes(group["last-delivered-id"])
            return b"0-0"

        position = self._link.run("looking at scores", last_delivered)
        self._link.run("waiting for scores", lambda client: client.xread({keys.scored: position}, 1, timeout_ms))

    def active(self) -> list[Slot]:
        """The slots held, in admission order."""
        members: Any = self._link.run(
            "reading slots", lambda client: client.zrange(self._link.keys.slots, 0, -1, withscores=True)
        )
        return [Slot(int(task_id), int(sequence)) for task_id, sequence in members]

    def fetch(self, ids: Sequence[bytes]) -> list[Trajectory | None]:
        """Bodies of trajectory entries; None where one is gone or unreadable."""

        def read(client: redis.Redis) -> list[Any]:
            pipe = client.pipeline(transaction=False)
            for entry_id in ids:
                pipe.xrange(self._link.keys.trajectories, entry_id, entry_id)
            return list(pipe.execute())

        bodies: list[Trajectory | None] = []
        for found in self._link.run("fetching trajectories", read):
            try:
                bodies.append(decode(found[0][1][b"b"], Trajectory, self._max_bytes) if found else None)
            except BadMessage:
                bodies.append(None)
        return bodies

    def drop(self, task_id: int, reason: str, scored_ids: Sequence[bytes], outcome: str = "dropped") -> None:
        """End a group without training it; its slot returns."""
        self._fenced(self._link.script("close", task_id, outcome, reason, self._epoch, *scored_ids))
        self._seen.difference_update(scored_ids)

    def journal(self, record: BatchRecord) -> None:
        """Fix what a step trains on."""
        self._fenced(self._link.script("journal", self._epoch, record.step, encode(record, 1 << 30)))

    def records(self) -> dict[int, BatchRecord]:
        """Journaled steps that no checkpoint covers yet, by step."""
        found: Any = self._link.run("reading the journal", lambda client: client.hgetall(self._link.keys.journal))
        return {int(step): decode(body, BatchRecord, 1 << 30) for step, body in found.items()}

    def step(self, record: BatchRecord, version: int) -> None:
        """The record's step is done: its slots return, ``version`` is the newest."""
        samples = sum(bool(member.trajectory_id) for group in record.groups for member in group.members)
        tasks = [group.task_id for group in record.groups]
        self._fenced(self._link.script("step", self._epoch, record.step + 1, version, samples, *tasks))

    def commit(self, records: Sequence[BatchRecord]) -> None:
        """A durable checkpoint covers these steps: acknowledge and delete what they were trained on."""
        for record in records:
            tasks = [group.task_id for group in record.groups]
            scored = [member.scored_id for group in record.groups for member in group.members]
            self._fenced(self._link.script("commit", self._epoch, record.step, len(tasks), *tasks, *scored))
            self._seen.difference_update(scored)

    def _recover(self, count: int) -> list[Entry]:
        entries: list[Entry] = []
        cursor: bytes = b"0-0"
        while True:
            cursor, batch = self._fenced(self._link.script("recover", self._epoch, cursor, count))
            entries += [entry for entry in batch if entry and entry[0] not in self._seen]
            if cursor == b"0-0":
                return entries

    def _parse(self, entries: list[Any]) -> list[Outcome]:
        outcomes = []
        for entry_id, raw in entries:
            fields = raw if isinstance(raw, dict) else dict(zip(raw[::2], raw[1::2], strict=True)) if raw else {}
            self._seen.add(entry_id)
            try:
                score = decode(fields.get(b"b", b""), Score, self._max_bytes)
            except BadMessage as error:
                score = Score(status="error", reason=str(error), scorer="trainer")
            body = fields.get(b"e", b"-")
            outcomes.append(
                Outcome(
                    scored_id=entry_id,
                    task_id=number(fields.get(b"t")),
                    sample=number(fields.get(b"s")),
                    group_size=number(fields.get(b"n")),
                    trajectory_id=None if body == b"-" or score.status != "ok" else body,
                    score=score,
                    excluded=body != b"-" and score.status != "ok",
                )
            )
        return outcomes

    def _fenced(self, answer: Any) -> Any:
        if answer == b"fenced":
            raise FencedError(f"trainer {self._epoch} was replaced by a newer one and stops")
        return answer
