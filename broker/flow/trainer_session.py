"""The trainer's side of the broker: claim, journal, step, commit, all fenced by its leader term.

Exactly once: the journal fixes what a step trains on before the step; slots return at the step; entries are
acknowledged only when a durable checkpoint covers them. After a crash the next trainer finds the same entries and the
same records. If the broker lost data, the next ``take_over`` repairs it from what the trainer knows.
"""

import json
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, TypeAlias, cast

import msgspec
import redis

from broker.connection.connection import BLOCK_MS, Connection, RunData
from broker.connection.counters import COMMIT_SECONDS, COMMITS, FENCED, add_counts
from broker.connection.keys import TRAINER
from broker.connection.stream_pages import Entry
from broker.flow.fencing import accepted, run_fenced, term_number
from broker.flow.ledger import ledger_fields, pairs
from broker.flow.owner import Owner, name_taken
from broker.flow.pipeline import PipelineSnapshot, ScoredSample, Slot
from broker.flow.progress import Takeover, TakeoverRequest
from broker.queues.bodies import body_name, read_bodies
from broker.queues.consumer_group import ensure_group, groups_of, number, with_group
from broker.queues.scores import outcomes_in
from schemas.codec import SCHEMA_VERSION, BadMessage, decode, encode
from schemas.errors import BrokerDamaged, BrokerLost, ConfigError, FencedError
from schemas.messages import BatchRecord, DeadLetter, Score, Trajectory

SILENT_CONSUMER_S = 3600.0
"""Seconds of silence after which a consumer that holds nothing is deleted from its group."""

Diagnosis: TypeAlias = Literal["waiting", "complete", "ended"]


class TrainerSession(RunData):
    """The pipeline operations of one trainer process.

    Every method raises FencedError once a newer trainer took over, and BrokerLost if the broker lost recent writes.
    """

    def __init__(self, connection: Connection, max_bytes: int) -> None:
        super().__init__(connection, max_bytes)
        self.leader_term = ""
        """Leader term of this trainer; "" before ``take_over``."""
        self._server = ""
        self._connections = 0
        self._losses = -1
        self._seen: set[bytes] = set()

    def take_over(self, request: TakeoverRequest) -> Takeover:
        """Take the run over, and repair the broker where it knows less than this trainer."""
        self._connection.authority = True
        self._seen.clear()
        self._losses = -1
        told = request.to_json() | {"nonce": secrets.token_hex(4), "schema": SCHEMA_VERSION}
        self._server = self._server_id()
        self._connections = self._connection.connections
        reply = self._connection.run_script("take_over", json.dumps(told), request.progress.prompts)
        if reply[0] == b"foreign" and len(reply) > 1:
            raise name_taken(self._connection, request.owner, Owner.parse(reply[1:]))
        if reply[0] == b"foreign":
            raise ConfigError(
                "the broker holds a run of this name whose checkpoints are not in this run's folder:"
                " restore the folder, give the run another run.name, or delete what is left with `tidemill purge`"
            )
        answer = [part.decode() for part in reply]
        leader_term, step, version, broker_lifetime, started, lost, surplus, refused = answer
        self.leader_term = leader_term
        return Takeover(
            leader_term, int(step), int(version), broker_lifetime, started, lost == "1", int(surplus), refused.strip()
        )

    def _server_id(self) -> str:
        info = self._connection.run_command("looking at the server", "info", "server")
        return str(info["run_id"])

    def read_pipeline(self) -> PipelineSnapshot:
        """Read the pipeline at one moment; BrokerLost if the server was restarted."""
        raw = self._connection.run_script("read_pipeline")
        self._current(raw[0].decode() if raw[0] and b"step" in raw[1][::2] else None)
        if self._connections != self._connection.connections:
            self._connections = self._connection.connections
            if self._server_id() != self._server:
                raise BrokerLost("the broker was restarted; its data has to be compared with the trainer's")
        if b"pause_id" not in raw[6][::2]:
            # The takeover wrote it. Without it, a pause would end for the trainer alone.
            raise BrokerLost("the broker has lost the orders to this run")
        found = ledger_fields(raw) | {
            "slots": [Slot(int(task_id), int(order)) for task_id, order in zip(raw[3][::2], raw[3][1::2], strict=True)],
            "waiting": [int(task_id) for task_id in raw[4]],
            "counts": pairs(raw[2]),
        }
        snapshot = msgspec.convert(found, PipelineSnapshot, strict=False)
        if not snapshot.balanced:
            raise BrokerDamaged("the broker's ledger does not add up: a part of it is gone")
        return snapshot

    def diagnose_group(self, task_id: int) -> Diagnosis:
        """Return whether a group waits for samples, is complete, or no longer holds a slot.

        BrokerDamaged if a part of it is lost.
        """
        answer: bytes = self._connection.run_script("diagnose_group", task_id)
        if answer == b"damaged":
            raise BrokerDamaged(f"the broker has lost a part of prompt group {task_id}")
        return cast(Diagnosis, answer.decode())

    def _current(self, leader_term: str | None) -> None:
        if leader_term == self.leader_term:
            return
        if leader_term is None or term_number(leader_term) < term_number(self.leader_term):
            raise BrokerLost("the broker has forgotten this trainer")
        add_counts(self._connection, {FENCED: 1})
        raise FencedError(f"trainer {self.leader_term} was replaced by {leader_term} and stops")

    def claim_scores(self, count: int) -> list[ScoredSample]:
        """Read outcomes that this trainer has not seen, without waiting; first those claimed before a lost reply."""
        if self._losses != self._connection.losses:
            self._losses = self._connection.losses
            recovered = self._recover(count)
            if recovered:
                return self._parse(recovered)
        entries = self._with_group("claim_scores", count)
        return self._parse([entry for entry in entries if entry[0] not in self._seen])

    def _with_group(self, script: str, *args: str | bytes | int) -> Any:
        """Run a script that reads as a consumer of the group; create the group again if it was deleted."""
        return with_group(
            self._connection,
            lambda: ensure_group(self._connection, self._keys.scored, TRAINER),
            lambda: self._run(script, *args),
        )

    def wait_for_scores(self, timeout_ms: int = BLOCK_MS) -> None:
        """Wait until there may be a new outcome, or until the timeout."""

        def last_delivered(client: redis.Redis) -> bytes:
            for group in groups_of(client, self._keys.scored):
                if group["name"] == TRAINER.encode():
                    return bytes(group["last-delivered-id"])
            return b"$"

        position = self._connection.run("looking at scores", last_delivered)
        self._connection.run_command("waiting for scores", "xread", {self._keys.scored: position}, 1, timeout_ms)

    def fetch_trajectories(self, places: Sequence[bytes]) -> list[Trajectory | BadMessage | None]:
        """Read trajectories by their places (ENTRY/BODY); None if one is gone, BadMessage if it can't be trained."""
        bodies = read_bodies(self._connection, [body_name(place) for place in places])
        return [None if body is None else self._check(body) for body in bodies]

    def _check(self, body: bytes) -> Trajectory | BadMessage:
        try:
            return decode(body, Trajectory, self._max_bytes)
        except BadMessage as error:
            return error

    def drop_group(
        self,
        task_id: int,
        reason: str,
        scored_ids: Sequence[bytes],
        outcome: str = "dropped",
        solve_rate: float | None = None,
    ) -> bool:
        """End a group without training it; its slot returns. False if it held none.

        solve_rate: share of its samples that are correct, for the curriculum; None if unknown.
        """
        entries = _entries(scored_ids)
        answer = self._connection.run_script(
            "close_group", task_id, outcome, reason, self.leader_term, _in_255(solve_rate), *entries
        )
        accepted(self._connection, answer, self.leader_term)
        self._seen.difference_update(entries)
        return bool(answer == b"ok")

    def journal_batch(self, record: BatchRecord) -> None:
        """Write the batch of a step to the journal, before the step; it does not change afterwards."""
        self._run("journal_batch", record.step, encode(record, 1 << 30))

    def read_journal(self) -> dict[int, BatchRecord]:
        """Read the journaled steps that no checkpoint covers, by step."""
        found = self._connection.run_command("reading the journal", "hgetall", self._keys.journal)
        return {int(step): decode(body, BatchRecord, 1 << 30) for step, body in found.items()}

    def read_prompts(self) -> bytes:
        """Read the curriculum's statistics of all prompts."""
        found = self._connection.run_command("reading the statistics of prompts", "get", self._keys.prompts)
        return found or b""

    def complete_step(self, record: BatchRecord, solve_rates: Mapping[int, float] | None = None) -> None:
        """Record a step as done: its slots return, and its weight version is the newest.

        solve_rates: share of correct samples of its groups, by task id, for the curriculum.
        """
        rates = solve_rates or {}
        samples = sum(bool(member.trajectory_id) for group in record.groups for member in group.members)
        tasks = [part for group in record.groups for part in (group.task_id, _in_255(rates.get(group.task_id)))]
        self._run("complete_step", record.step + 1, record.new_version, samples, *tasks)

    def commit_steps(self, records: Sequence[BatchRecord]) -> None:
        """Acknowledge and delete what these steps were trained on, because a durable checkpoint covers them.

        Consumers of workers that ended long ago are deleted, too.
        """
        began = time.monotonic()
        for record in records:
            tasks = [group.task_id for group in record.groups]
            members = [member for group in record.groups for member in group.members]
            scored = _entries(member.scored_id for member in members)
            bodies = [member.trajectory_id for member in members if member.trajectory_id]
            self._run("commit_step", record.step, len(tasks), len(scored), *tasks, *scored, *bodies)
            self._seen.difference_update(scored)
        if records:
            self._run("forget_consumers", int(SILENT_CONSUMER_S * 1000))
            add_counts(self._connection, {COMMITS: len(records), COMMIT_SECONDS: time.monotonic() - began})

    def _recover(self, count: int) -> list[Entry]:
        entries: list[Entry] = []
        cursor: bytes = b"0-0"
        while True:
            cursor, batch = self._with_group("reclaim_scores", cursor, count)
            entries += [entry for entry in batch if entry and entry[0] not in self._seen]
            if cursor == b"0-0":
                return entries

    def _parse(self, entries: list[Any]) -> list[ScoredSample]:
        self._seen.update([entry_id for entry_id, _ in entries])
        return [outcome for entry_id, raw in entries for outcome in self._read_scores(entry_id, raw)]

    def _read_scores(self, entry_id: bytes, raw: Any) -> list[ScoredSample]:
        """Read the outcomes in an entry of the scores, a flat list of fields and values."""
        names = iter(raw or ())
        fields: dict[bytes, bytes] = dict(zip(names, names, strict=True))
        outcomes = outcomes_in(fields)
        if not outcomes:
            nothing = Score(status="error", reason="not an outcome")
            ended = number(fields.get(b"t")) if b"end" in fields else -1
            return [ScoredSample(entry_id, ended, -1, -1, None, nothing)]
        task_id, size, alone = number(fields.get(b"t")), number(fields.get(b"n")), len(outcomes) == 1
        found: list[ScoredSample] = []
        for sample, place, body in outcomes:
            try:
                score = decode(body, Score, self._max_bytes)
            except BadMessage as error:
                score = Score(status="error", reason=str(error))
            scored_id = entry_id if alone else b"%b/%d" % (entry_id, sample)
            published, counts = place != b"-", score.status == "ok"
            trajectory_id = place if published and counts else None
            found.append(ScoredSample(scored_id, task_id, sample, size, trajectory_id, score, published and not counts))
        return found

    def discard_scores(self, outcomes: Sequence[ScoredSample]) -> None:
        """Remove outcomes of groups that have ended; entries without a readable task become dead letters."""
        if not outcomes:
            return
        letters: dict[bytes, bytes] = {}
        for outcome in outcomes:
            reason = outcome.score.reason or "not an outcome"
            letter = DeadLetter(source="scored", reason=reason, deliveries=1, payload=b"")
            (entry,) = _entries([outcome.scored_id])
            letters[entry] = encode(letter) if outcome.task_id < 0 else b""
        self._run("discard_scores", *chain.from_iterable(letters.items()))
        self._seen.difference_update(letters)

    def finish_run(self) -> None:
        """Mark the run as finished, so that every service ends."""
        self._run("finish_run")

    def _run(self, script: str, *args: str | bytes | int) -> Any:
        return run_fenced(self._connection, script, self.leader_term, *args)


def _entries(scored_ids: Iterable[bytes]) -> list[bytes]:
    """Return the entries of outcomes, each once."""
    return list(dict.fromkeys([scored_id.partition(b"/")[0] for scored_id in scored_ids]))


def _in_255(rate: float | None) -> int | str:
    """Encode a solve rate as in the statistics of prompts; "" if unknown."""
    return "" if rate is None else round(255 * rate)
