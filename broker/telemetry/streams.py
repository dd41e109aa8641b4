"""Telemetry in streams: heartbeats, events, step metrics, evaluations.

Losing a line of it harms no training, and a line may come twice after a lost answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import redis

from broker.connection.connection import Connection
from broker.connection.scripts import OTHER_RUN
from broker.connection.stream_pages import read_page
from broker.queues.consumer_group import split_calls
from broker.queues.dead_letters import UnusableTask, check_sendable, letter_of
from broker.queues.images import image_args
from broker.queues.tasks import eval_version
from broker.telemetry.pass_at import DatasetResult
from schemas.codec import BadMessage, decode, encode
from schemas.errors import BrokerDamaged, InfraError
from schemas.messages import Event, Heartbeat, Task
from schemas.run_record import JoinedRun

KEEP_LINES = 10_000
FORGOTTEN_S = 600
"""A service that was silent for so long is listed no more."""


@dataclass(frozen=True)
class EvalResult:
    """Counts of an evaluation. mean: of the scored samples' rewards; time: of the last score, Unix seconds.

    length: mean loss tokens of the scored samples; None where that is not known.
    off_version: samples with tokens of another weight version: no generator had the evaluated one any more.
    datasets: the same by the label of the dataset.
    """

    version: int
    n: int
    scored: int
    failed: int
    mean: float
    time: float
    off_version: int = 0
    length: float | None = None
    datasets: Mapping[str, DatasetResult] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return self.scored + self.failed >= self.n


class MendedSamples(NamedTuple):
    """What a look for lost samples of an evaluation found: so many queued again, failed, and not yet ended."""

    again: int = 0
    failed: int = 0
    left: int = 0


def _stamp(client: redis.Redis) -> float:
    seconds, micros = client.time()
    return float(seconds) + micros / 1e6


class Heartbeats:
    """Heartbeats of services. One silent for long is shown as such; nothing depends on it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, heartbeat: Heartbeat) -> None:
        """Send a heartbeat, stamped with the broker's clock. Tried once: the next one comes soon.

        Leases are renewed by the same thread, and must not wait for it.
        """
        heartbeat.time = self._connection.run_once("reading the broker's clock", _stamp)
        self._connection.run_script_once("heartbeat", heartbeat.service, encode(heartbeat), FORGOTTEN_S)

    def claim(self, heartbeat: Heartbeat, left: bytes) -> bytes | None:
        """Send the first heartbeat of a process that may be the only one of its name; None when it has the name.

        Otherwise nothing is sent, and the answer is the heartbeat of the process that has it. left: the bytes of the
        heartbeat that the name's last process is known to have left, b"" for none: any other is of a living process.
        """
        heartbeat.time = self.read_clock()
        answer: bytes = self._connection.run_script(
            "heartbeat", heartbeat.service, encode(heartbeat), FORGOTTEN_S, left
        )
        return None if answer == b"ok" else answer

    def send_all(self, heartbeats: Sequence[Heartbeat]) -> None:
        """``send`` for many services in one round trip; who sends it has stamped them."""
        calls = [(beat.service, encode(beat), FORGOTTEN_S) for beat in heartbeats]
        self._connection.run_scripts("heartbeat", calls)

    def read_clock(self) -> float:
        """Unix seconds by the broker's clock."""
        return self._connection.run("reading the broker's clock", _stamp)

    def remove(self, service: str) -> None:
        """Remove a service that ended on purpose. Tried once: an end waits for nothing."""
        self._connection.run_once("leaving", lambda client: client.hdel(self._connection.keys.services, service))

    def read(self, service: str) -> Heartbeat | None:
        """The last heartbeat of a service; None if there is none, or one of another version of Tidemill."""
        return parse_heartbeat(self.read_bytes(service))

    def read_bytes(self, service: str) -> bytes:
        """The last heartbeat of a service as it was sent, b"" if there is none."""
        body: Any = self._connection.run(
            "reading a heartbeat", lambda c: c.hget(self._connection.keys.services, service)
        )
        return body or b""

    def read_age_s(self, service: str) -> float | None:
        """Seconds since the last heartbeat of a service, by the broker's clock; None if there is none."""
        beat = self.read(service)
        return None if beat is None else max(0.0, self.read_clock() - beat.time)

    def list_heard(self, within_s: float) -> list[str]:
        """List the names of the services that were heard of in this time; who can't be read is not known to live."""
        key = self._connection.keys.services
        found: Any = self._connection.run("listing services", lambda client: client.hgetall(key))
        now, heard = self.read_clock(), []
        for name, body in found.items():
            try:
                silent_s = now - decode(body, Heartbeat).time
            except BadMessage:
                continue
            if silent_s < within_s:
                heard.append(name.decode(errors="replace"))
        return sorted(heard)

    def list(self) -> list[Heartbeat]:
        """The last heartbeat of every service, by name, but for those of another version of Tidemill."""
        key = self._connection.keys.services
        found: Any = self._connection.run("listing services", lambda client: client.hgetall(key))
        beats = [beat for body in found.values() if (beat := parse_heartbeat(body)) is not None]
        return sorted(beats, key=lambda beat: beat.service)


def parse_heartbeat(body: bytes) -> Heartbeat | None:
    """Parse a heartbeat as it was sent; None for none, and for one of another version of Tidemill."""
    try:
        return decode(body, Heartbeat)
    except BadMessage:
        return None


class Events:
    """The timeline of a run."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def emit(self, event: Event) -> None:
        self._connection.run_script("append_telemetry", "events", "b", encode(event), KEEP_LINES)

    def tail(self, count: int) -> list[Event]:
        """The newest ``count`` events, oldest first."""
        return [noted.event for noted in self.newest(count)]

    def newest(self, count: int) -> list[StoredEvent]:
        """The newest ``count`` events with their ids, oldest first."""
        found: Any = self._connection.run(
            "reading events", lambda client: client.xrevrange(self._connection.keys.events, count=count)
        )
        return _noted(reversed(found))

    def page(self, count: int, cursor: str | None, newest: bool) -> tuple[list[StoredEvent], str | None]:
        """A page of events, from the oldest on or from the newest back, and the cursor of the following one."""
        found, following = read_page(self._connection, self._connection.keys.events, "events", count, cursor, newest)
        return _noted(found), following

    def read_after(self, id: str, count: int, block_ms: int | None = None) -> list[StoredEvent]:
        """Read up to ``count`` events after ``id``, oldest first; waits up to ``block_ms`` for one if given."""
        key = self._connection.keys.events
        found: Any = self._connection.run("following events", lambda client: client.xread({key: id}, count, block_ms))
        streams = found.values() if isinstance(found, dict) else [entries for _, entries in found or []]
        return _noted(entry for entries in streams for entry in _flat(entries))


@dataclass(frozen=True)
class StoredEvent:
    """An event with its id in the stream, which holds the time of the broker's clock (Unix seconds)."""

    id: str
    time: float
    event: Event


def _noted(entries: Iterable[tuple[bytes, dict[bytes, bytes]]]) -> list[StoredEvent]:
    """Entries of the stream; what is no event is in nobody's timeline."""
    found = []
    for entry_id, fields in entries:
        try:
            event = decode(fields.get(b"b", b""), Event)
        except BadMessage:
            continue
        id = entry_id.decode()
        found.append(StoredEvent(id, int(id.partition("-")[0]) / 1000, event))
    return found


def _flat(entries: Any) -> Any:
    """Entries of one stream; one version of the protocol puts them into a list more."""
    return entries[0] if entries and isinstance(entries[0], list) else entries


class Metrics:
    """Metrics of steps, a JSON object each; the trainer's metrics.jsonl holds them all."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def append(self, line: dict[str, Any]) -> None:
        self._connection.run_script("append_telemetry", "metrics", "j", json.dumps(line), KEEP_LINES)

    def tail(self, count: int) -> list[dict[str, Any]]:
        """The newest ``count`` lines, oldest first."""
        key = self._connection.keys.metrics
        found: Any = self._connection.run("reading metrics", lambda client: client.xrevrange(key, count=count))
        return _figures(reversed(found))

    def read_after(self, id: str, count: int) -> tuple[str, list[dict[str, Any]]]:
        """Read up to ``count`` lines after the entry ``id``; return also the id to go on from."""
        found: Any = self._connection.run(
            "following metrics", lambda client: client.xrange(self._connection.keys.metrics, f"({id}", "+", count)
        )
        last = found[-1][0].decode() if found else id
        return last, _figures(found)


def _figures(entries: Iterable[tuple[bytes, dict[bytes, bytes]]]) -> list[dict[str, Any]]:
    """Entries of the stream; what is no JSON object is nobody's figures."""
    lines = []
    for _, fields in entries:
        try:
            line = json.loads(fields.get(b"j", b""))
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines


KEPT_EVALUATIONS = 1000
"""Complete evaluations that the broker keeps, the newest; all are in the run's folder, in evaluations.jsonl."""
SCANNED = 1000
"""Fields of groups that one look for lost samples goes through at once."""


class Evals:
    """Evaluations on held-out prompts, each opened once and counted as scores arrive."""

    def __init__(self, connection: Connection, max_bytes: int) -> None:
        self._connection = connection
        self._max_bytes = max_bytes

    def open(
        self,
        version: int,
        tasks: Sequence[Task | UnusableTask],
        run: JoinedRun | None = None,
        images: Mapping[str, bytes] | None = None,
    ) -> bool:
        """Queue the tasks of one evaluation, all at once; False if this version's was opened before.

        Their bodies and images are sent before, in parts: who dies on the way has opened nothing. Samples of a task
        that can't be sent count as failed, with a dead letter. run: whose tasks these are; the error of JoinedRun when
        the broker has another one. images: bytes of the tasks' images by digest. InfraError when the broker keeps
        losing what was sent.
        """
        run = run or JoinedRun()
        args: list[int | bytes | str] = [version, run.id, KEPT_EVALUATIONS]
        used: dict[str | bytes, str | bytes] = {}
        bodies: dict[int, bytes] = {}
        for task in tasks:
            body, wrong = check_sendable(task, self._max_bytes)
            if body:
                bodies[task.task_id] = body
            parts = image_args(task if body else None, images or {})
            digests = parts[::2]
            used |= zip(digests, parts[1::2], strict=True)
            letter = letter_of(wrong, self._max_bytes)
            args += [task.task_id, task.n, letter, task.dataset, len(digests), *digests]
        deadline = time.monotonic() + self._connection.deadline_s
        while self._stage(version, run, "images", used) and self._stage(version, run, "tasks", bodies):
            answer = self._connection.run_script("open_evaluation", *args)
            if answer == OTHER_RUN:
                raise run.replaced()
            if answer != b"again":
                return bool(answer)
            if time.monotonic() > deadline:
                raise InfraError(f"the broker loses parts of the evaluation of version {version} again and again")
        return False

    def _stage(
        self, version: int, run: JoinedRun, what: str, items: Mapping[int, bytes] | Mapping[str | bytes, str | bytes]
    ) -> bool:
        """Bring images or bodies of tasks of an evaluation in parts; False when it was opened before."""
        for part in split_calls(list(items.items())):
            answer = self._connection.run_script("stage_evaluation", version, run.id, what, *part)
            if answer == OTHER_RUN:
                raise run.replaced()
            if not answer:
                return False
        return True

    def mend(self) -> dict[int, MendedSamples]:
        """Queue samples again whose entries the broker has lost; those that it has lost altogether count as failed.

        Returned: what was found of each version whose evaluation is under way.
        """
        found: dict[int, MendedSamples] = {}
        cursor = b"0"
        while True:
            cursor, *parts = self._connection.run_script("mend_evaluations", cursor, SCANNED)
            for task_id, *counts in zip(parts[::4], parts[1::4], parts[2::4], parts[3::4], strict=True):
                version = eval_version(int(task_id))
                before = found.get(version, MendedSamples())
                found[version] = MendedSamples(*(old + int(new) for old, new in zip(before, counts, strict=True)))
            if cursor == b"0":
                return found

    def samples_left(self, version: int) -> int | None:
        """Samples of an evaluation that are neither scored nor failed yet; None when the broker has no such evaluation.

        BrokerDamaged when there are outcomes of it all the same.
        """
        key, fields = self._connection.keys.evals, [f"{version}:{name}" for name in ("n", "scored", "failed")]
        found: Any = self._connection.run("reading an evaluation", lambda client: client.hmget(key, fields))
        n, *ended = found
        if n is None and any(ended):
            raise BrokerDamaged(f"the broker has lost a part of the evaluation of version {version}")
        return None if n is None else int(n) - sum(int(count or 0) for count in ended)

    def read_results(self) -> list[EvalResult]:
        """All evaluations, by version, also those that are still under way."""
        key = self._connection.keys.evals
        found: Any = self._connection.run("reading evaluations", lambda client: client.hgetall(key))
        versions: dict[int, dict[str, float]] = {}
        for key, value in found.items():
            version, _, name = key.partition(b":")
            try:
                versions.setdefault(int(version), {})[name.decode()] = float(value)
            except ValueError:
                continue
        return [
            EvalResult(
                version=version,
                n=int(fields.get("n", 0)),
                scored=int(fields.get("scored", 0)),
                failed=int(fields.get("failed", 0)),
                mean=fields.get("sum", 0.0) / max(fields.get("scored", 0.0), 1.0),
                time=fields.get("time", 0.0),
                off_version=int(fields.get("off_version", 0)),
                length=_length(fields),
                datasets=_by_dataset(fields),
            )
            for version, fields in sorted(versions.items())
            if "n" in fields
        ]


def _length(fields: Mapping[str, float]) -> float | None:
    """Mean loss tokens of the scored samples; None where they are not known."""
    return fields["tokens"] / fields["scored"] if "tokens" in fields and fields.get("scored") else None


def _by_dataset(fields: Mapping[str, float]) -> dict[str, DatasetResult]:
    """The results by dataset, of fields LABEL:NAME, and LABEL:prompts:SCORED:CORRECT."""
    counts: dict[str, dict[str, float]] = {}
    prompts: dict[str, dict[tuple[int, int], int]] = {}
    for name, value in fields.items():
        label, colon, rest = name.partition(":")
        kind, _, outcome = rest.partition(":")
        scored, _, correct = outcome.partition(":")
        if kind == "prompts" and scored.isdigit() and correct.isdigit():
            prompts.setdefault(label, {})[int(scored), int(correct)] = int(value)
        elif colon:
            counts.setdefault(label, {})[rest] = value
    return {
        label: DatasetResult(
            n=int(of.get("n", 0)),
            scored=int(of.get("scored", 0)),
            failed=int(of.get("failed", 0)),
            mean=of.get("sum", 0.0) / max(of.get("scored", 0.0), 1.0),
            length=_length(of),
            prompts=prompts.get(label, {}),
        )
        for label, of in sorted(counts.items())
        if "n" in of
    }
