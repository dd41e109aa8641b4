"""The two hops that many workers share: tasks to generators, trajectories to reward services.

At-least-once: an entry stays pending until its result is published in the same atomic
step; work of a silent worker is claimed by another after the lease; an entry that
nobody can read, or that killed its worker too often, goes to the dead letters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import redis
import structlog

from broker.dead_letters import LIMIT, letter_bytes
from broker.eval_ids import eval_version
from broker.keys import GENERATORS, REWARD
from broker.link import BLOCK_MS, GONE, Link, word
from broker.tally import CLOSED, DUPLICATE, LEASES_EXPIRED, tally
from schemas.codec import BadMessage, Message, decode, encode
from schemas.errors import InfraError
from schemas.messages import DeadLetter, Score, Task, Trajectory

M = TypeVar("M", bound=Message)
T = TypeVar("T")
log = structlog.get_logger()
AT_ONCE = 64
"""Samples in one call of a script: the server does nothing else meanwhile."""
Entry = tuple[bytes, dict[bytes, bytes]]


class Delivery(msgspec.Struct, Generic[M], frozen=True, gc=False):
    """One entry handed to one worker.

    version: the least weight version to work with (tasks). again: another worker may have done a part.
    """

    entry_id: bytes
    stream: str
    message: M
    version: int = 0
    again: bool = False


class Evaluations(msgspec.Struct, frozen=True, gc=False):
    """What there is to evaluate.

    pending: version of the next task that nobody took, -1: none. opened: whether one's own version's was asked for.
    """

    pending: int
    opened: bool
    taken: list[Delivery[Task]]


class _Worker:
    """Reading as one consumer of a group: new entries, own pending ones after a lost reply, stale ones of others."""

    def __init__(self, link: Link, streams: list[str], group: str, consumer: str, max_deliveries: int) -> None:
        self._link = link
        self._streams = streams
        self._group = group
        self._consumer = consumer
        self._max_deliveries = max_deliveries
        self._held: dict[str, set[bytes]] = {stream: set() for stream in streams}
        self._losses = -1
        self._undated: dict[str, dict[bytes, float]] = {stream: {} for stream in streams}
        self._ensure_groups()

    def _ensure_groups(self) -> None:
        for stream in self._streams:
            ensure_group(self._link, stream, self._group)

    def _read(self, count: int, block_ms: int, streams: list[str] | None = None) -> list[tuple[str, Entry, int]]:
        if self._losses != self._link.losses:
            # A reply may have been lost after the server gave us entries: look at what is pending for us.
            self._losses = self._link.losses
            self._ensure_groups()
            stranded = self._fetch("0", count=10_000, block_ms=None)
            fresh = [(stream, entry) for stream, entry in stranded if entry[0] not in self._held[stream]]
            if fresh:
                # Of a dead worker of this name, or of a lost answer: a part may be done. Negative says so.
                return [(stream, entry, -self._deliveries(stream, entry[0])) for stream, entry in self._take(fresh)]
        return [(stream, entry, 1) for stream, entry in self._take(self._fetch(">", count, block_ms, streams))]

    def _fetch(
        self, position: str, count: int, block_ms: int | None, streams: list[str] | None = None
    ) -> list[tuple[str, Entry]]:
        reply: Any = self._of_group(
            f"reading {self._group}",
            lambda client: client.xreadgroup(
                self._group,
                self._consumer,
                dict.fromkeys(streams or self._streams, position),
                count=count,
                block=block_ms,
            ),
        )
        pairs = reply.items() if isinstance(reply, dict) else reply or []
        found: list[tuple[str, Entry]] = []
        for stream, entries in pairs:
            batch = entries[0] if entries and isinstance(entries[0], list) else entries
            found += [(stream.decode(), entry) for entry in batch]
        return found

    def _of_group(self, what: str, operation: Callable[..., Any], *args: Any) -> Any:
        """An operation on groups, which are made again when somebody deleted them or their streams."""
        return of_group(self._link, self._ensure_groups, lambda: self._link.run(what, operation, *args))

    def _take(self, entries: list[tuple[str, Entry]]) -> list[tuple[str, Entry]]:
        for stream, entry in entries:
            self._held[stream].add(entry[0])
        return entries

    def _release(self, stream: str, entry_id: bytes) -> None:
        self._held[stream].discard(entry_id)

    def renew(self) -> None:
        """Tell the server that this worker is alive and still at all it holds. Call from a thread of its own."""
        for stream, held in self._held.items():
            ids = list(held.copy())
            if ids:
                self._claim_for_ourselves(stream, ids)

    def _claim_for_ourselves(self, stream: str, ids: list[bytes]) -> None:
        self._of_group(
            "renewing leases",
            lambda client: client.xclaim(
                stream, self._group, self._consumer, min_idle_time=0, message_ids=ids, justid=True
            ),
        )

    def _claim_stale(self, lease_s: float, count: int) -> list[tuple[str, Entry, int]]:
        claimed: list[tuple[str, Entry, int]] = []
        for stream in self._streams:
            self._undate(stream, lease_s)
            reply: Any = self._of_group(
                "claiming stale work",
                lambda client, stream: client.xautoclaim(
                    stream, self._group, self._consumer, min_idle_time=int(lease_s * 1000), count=count
                ),
                stream,
            )
            for entry in reply[1]:
                if entry[0] in self._held[stream]:
                    continue
                self._held[stream].add(entry[0])
                claimed.append((stream, entry, self._deliveries(stream, entry[0])))
        tally(self._link, {f"{LEASES_EXPIRED}:{self._group}": len(claimed)})
        return claimed

    def _deliveries(self, stream: str, entry_id: bytes) -> int:
        """How often the server has handed an entry out."""
        details: Any = self._of_group(
            "counting deliveries",
            lambda client: client.xpending_range(stream, self._group, entry_id, entry_id, 1),
        )
        return int(details[0]["times_delivered"]) if details else 1

    def _undate(self, stream: str, lease_s: float) -> None:
        """Leases count by the server's clock. After it was set back, work of the dead looks as if just delivered.

        What looks so for a whole lease, by our own clock, gets a date again and expires as usual.
        """
        pending: Any = self._of_group(
            "looking at leases", lambda client: client.xpending_range(stream, self._group, "-", "+", 1000)
        )
        now = time.monotonic()
        # A worker that renews its lease is seen within the same millisecond now and then, but not every time.
        fresh = {item["message_id"] for item in pending if item["time_since_delivered"] == 0}
        since = self._undated[stream]
        self._undated[stream] = {entry: since.get(entry, now) for entry in fresh}
        for item in pending:
            entry = item["message_id"]
            if entry in fresh and now - since.get(entry, now) > lease_s:
                self._of_group(
                    "dating leases",
                    lambda client, entry, owner: client.xclaim(
                        stream, self._group, owner, min_idle_time=0, message_ids=[entry], idle=0, justid=True
                    ),
                    entry,
                    item["consumer"],
                )


class TaskQueue(_Worker):
    """Tasks for one generator."""

    def __init__(self, link: Link, consumer: str, max_deliveries: int, max_bytes: int) -> None:
        keys = link.keys
        super().__init__(link, [keys.eval_tasks, keys.tasks], GENERATORS, consumer, max_deliveries)
        self._max_bytes = max_bytes

    def read(self, count: int, block_ms: int = BLOCK_MS, evaluations: bool = True) -> list[Delivery[Task]]:
        """Up to ``count`` tasks of each kind; empty after ``block_ms`` without any.

        Without ``evaluations`` new ones of training only; what was this generator's before comes all the same.
        """
        return self._decode(self._read(count, block_ms, None if evaluations else [self._link.keys.tasks]))

    def take_evaluations(self, version: int, count: int, late: bool = False) -> Evaluations:
        """Up to ``count`` evaluation tasks for exactly ``version``, with ``late`` for older ones, too; no waiting."""
        stream = self._link.keys.eval_tasks
        pending, opened, entries = self._link.script("eval_take", self._consumer, count, version, int(late))
        pairs = [(entry, dict(zip(fields[::2], fields[1::2], strict=True))) for entry, fields in entries]
        taken = self._take([(stream, pair) for pair in pairs])
        return Evaluations(int(pending), bool(opened), self._decode([(stream, entry, 1) for stream, entry in taken]))

    def claim_stale(self, lease_s: float, count: int) -> list[Delivery[Task]]:
        """Tasks of generators that were silent for longer than the lease."""
        return self._decode(self._claim_stale(lease_s, count))

    def missing(self, task: Task) -> list[int]:
        """Sample indices of the task that nobody has published yet."""
        fields = [f"{task.task_id}:{sample}" for sample in range(task.n)]
        present: Any = self._link.run(
            "looking for missing samples", lambda client: client.hmget(self._link.keys.samples, fields)
        )
        return [sample for sample, entry in enumerate(present) if entry is None]

    def publish(self, task_id: int, trajectories: Sequence[Trajectory]) -> list[str]:
        """Hand over finished samples of one task; ok, dup, closed or failed for each. With the last, the task is done.

        One that is over broker.max_message_bytes failed: dead letter, and its group goes on without it.
        """
        return self.publish_all([(task_id, trajectories)])[0]

    def publish_all(self, results: Sequence[tuple[int, Sequence[Trajectory]]]) -> list[list[str]]:
        """``publish`` for several tasks in one round trip."""
        calls: list[list[int | bytes | str]] = []
        refused: set[tuple[int, int]] = set()
        for task_id, trajectories in results:
            off = [item.sample for item in trajectories if off_version(item)]
            args: list[int | bytes | str] = [task_id, f",{','.join(map(str, off))}," if off else ""]
            for trajectory in trajectories:
                try:
                    body = encode(trajectory, self._max_bytes)
                except BadMessage as error:
                    self.fail_sample(task_id, trajectory.sample, str(error))
                    refused.add((task_id, trajectory.sample))
                    continue
                args += [trajectory.sample, trajectory.loss_mask.data.count(1), body]
            calls.append(args)
        answers = self._link.scripts("publish", calls)
        said = [answer for words in answers for answer in words]
        tally(self._link, {f"{DUPLICATE}:publish": said.count(b"dup"), CLOSED: said.count(b"closed")})
        words = [iter(answer) for answer in answers]
        return [
            ["failed" if (task_id, item.sample) in refused else next(answer).decode() for item in trajectories]
            for (task_id, trajectories), answer in zip(results, words, strict=True)
        ]

    def fail_sample(self, task_id: int, sample: int, reason: str, payload: bytes = b"") -> None:
        """A sample that can't be made: dead letter, and its group goes on without it."""
        letter = DeadLetter(
            source="generator", reason=reason, deliveries=1, payload=payload, task_id=task_id, sample=sample
        )
        score = Score(status="error", reason=reason, scorer="generator")
        self._link.script("fail_sample", task_id, sample, letter_bytes(letter, self._max_bytes), encode(score))

    def hand_back(self, delivery: Delivery[Task], task: Task) -> bool:
        """Give an unfinished task to another generator at once; ``task`` carries the partial samples.

        It goes as it was delivered when the partial samples would make it too large.
        """
        try:
            body = encode(task, self._max_bytes)
        except BadMessage as error:
            log.warning("partial samples are lost", task_id=task.task_id, reason=str(error))
            body = encode(delivery.message, self._max_bytes)
        answer = self._link.script("hand_back", task.task_id, delivery.entry_id, body)
        self._release(delivery.stream, delivery.entry_id)
        return bool(answer == b"ok")

    def done(self, delivery: Delivery[Task]) -> None:
        """This worker is through with the task: its lease is no longer renewed."""
        self._release(delivery.stream, delivery.entry_id)

    def _decode(self, entries: list[tuple[str, Entry, int]]) -> list[Delivery[Task]]:
        deliveries = []
        for stream, (entry_id, fields), times in entries:
            if not fields:
                self._release(stream, entry_id)
                continue
            try:
                if abs(times) > self._max_deliveries:
                    raise BadMessage(f"delivered {abs(times)} times, its generators died or stalled each time")
                task = decode(fields.get(b"b", b""), Task, self._max_bytes)
                version = number(fields.get(b"v"))
                if version < 0:
                    raise BadMessage(f"its weight version {fields.get(b'v')!r} must be a number of 0 or more")
            except BadMessage as error:
                self._dead_task(stream, entry_id, fields, times, str(error))
                continue
            again = times != 1 or bool(task.partials)
            deliveries.append(Delivery(entry_id, stream, task, version, again))
        return deliveries

    def _dead_task(self, stream: str, entry_id: bytes, fields: dict[bytes, bytes], times: int, reason: str) -> None:
        task_id = number(fields.get(b"t"))
        letter = DeadLetter(
            source="tasks", reason=reason, deliveries=abs(times), payload=fields.get(b"b", b""), task_id=task_id
        )
        task = "" if task_id < 0 else task_id
        self._link.script("give_up", stream.rpartition(":")[2], entry_id, task, letter_bytes(letter, self._max_bytes))
        self._release(stream, entry_id)


class ScoreQueue(_Worker):
    """Trajectories for one reward service."""

    def __init__(self, link: Link, consumer: str, max_deliveries: int, max_bytes: int) -> None:
        super().__init__(link, [link.keys.trajectories], REWARD, consumer, max_deliveries)
        self._max_bytes = max_bytes

    def read(self, count: int, block_ms: int = BLOCK_MS) -> list[Delivery[Trajectory]]:
        """Up to ``count`` trajectories; empty after ``block_ms`` without any."""
        return self._decode(self._read(count, block_ms))

    def claim_stale(self, lease_s: float, count: int) -> list[Delivery[Trajectory]]:
        """Trajectories of reward services that were silent for longer than the lease."""
        return self._decode(self._claim_stale(lease_s, count))

    def publish(self, results: Sequence[tuple[Delivery[Trajectory], Score]]) -> list[str]:
        """Hand over scores; a failed one excludes its sample and leaves a dead letter, never a reward of 0."""
        keys: list[bytes] = []
        calls: list[list[Any]] = []
        for index, (delivery, score) in enumerate(results):
            if index % AT_ONCE == 0:
                calls.append([])
            keys.append(delivery.entry_id)
            sent = self._fitting(score)
            calls[-1] += _scored(delivery.entry_id, delivery.message.task_id, delivery.message.sample, sent)
            calls[-1].append(self._dead_score(delivery.message, sent))
        answers = self._link.scripts("score", calls) if calls else []
        self._held[self._link.keys.trajectories].difference_update(keys)
        said = [word.decode() for words in answers for word in words]
        tally(self._link, {f"{DUPLICATE}:score": said.count("dup")})
        return said

    def _fitting(self, score: Score) -> Score:
        """The score, or a failed one when it is too large to be sent."""
        try:
            encode(score, self._max_bytes)
        except BadMessage as error:
            return Score(status="error", reason=str(error), scorer="reward")
        return score

    def _dead_score(self, trajectory: Trajectory, score: Score) -> bytes:
        """What is kept of a sample whose reward failed; nothing otherwise."""
        if score.status == "ok":
            return b""
        letter = DeadLetter(
            source="reward",
            reason=f"{score.status}: {score.reason}",
            deliveries=1,
            payload=encode(trajectory, LIMIT),
            task_id=trajectory.task_id,
            sample=trajectory.sample,
        )
        return letter_bytes(letter, self._max_bytes)

    def _decode(self, entries: list[tuple[str, Entry, int]]) -> list[Delivery[Trajectory]]:
        deliveries = []
        for stream, (entry_id, fields), times in entries:
            if not fields:
                self._release(stream, entry_id)
                continue
            task_id, sample = number(fields.get(b"t")), number(fields.get(b"s"))
            try:
                if abs(times) > self._max_deliveries:
                    raise BadMessage(f"delivered {abs(times)} times, its reward services died or stalled each time")
                trajectory = decode(fields.get(b"b", b""), Trajectory, self._max_bytes)
                if (trajectory.task_id, trajectory.sample) != (task_id, sample):
                    raise BadMessage(
                        f"is sample {trajectory.task_id}:{trajectory.sample}, its entry says {task_id}:{sample}"
                    )
            except BadMessage as error:
                letter = DeadLetter(
                    source="trajectories",
                    reason=str(error),
                    deliveries=abs(times),
                    payload=fields.get(b"b", b""),
                    task_id=task_id,
                    sample=sample,
                )
                filed = letter_bytes(letter, self._max_bytes)
                if task_id >= 0 and sample >= 0:
                    score = Score(status="error", reason=str(error), scorer="reward")
                    self._link.script("score", *_scored(entry_id, task_id, sample, score), filed)
                    self._release(stream, entry_id)
                else:
                    self._link.script("bury", entry_id, filed)
                    self._release(stream, entry_id)
                continue
            deliveries.append(Delivery(entry_id, stream, trajectory))
        return deliveries


def off_version(trajectory: Trajectory) -> bool:
    """Whether it belongs to an evaluation and has tokens of another version than is evaluated."""
    if trajectory.kind != "eval":
        return False
    version = eval_version(trajectory.task_id)
    return any(span.version != version for span in trajectory.spans)


def _scored(entry_id: bytes, task_id: int, sample: int, score: Score) -> tuple[bytes | int | str, ...]:
    """A result as the script takes it, but for the dead letter."""
    return entry_id, task_id, sample, encode(score), repr(score.reward) if score.status == "ok" else ""


def number(text: bytes | None) -> int:
    """A non-negative integer field, or -1."""
    return int(text) if text is not None and text.isdigit() else -1


def of_group(link: Link, ensure: Callable[[], None], operation: Callable[[], T]) -> T:
    """An operation that needs consumer groups; when they are gone they are made again, until the deadline."""
    end = time.monotonic() + link.deadline_s
    while True:
        try:
            return operation()
        except redis.ResponseError as error:
            if word(error) not in GONE:
                raise
            if time.monotonic() > end:
                raise InfraError(f"consumer groups vanish as fast as they are made: {error}") from error
        ensure()


def ensure_group(link: Link, stream: str, group: str) -> None:
    """Make stream and group, from the first entry on, if they are not there."""

    def create(client: redis.Redis) -> None:
        # Looked at first: making one is refused when memory is full, also one that is there.
        known: Any = client.xinfo_groups(stream) if client.exists(stream) else []
        if any(info["name"] == group.encode() for info in known):
            return
        try:
            client.xgroup_create(stream, group, id="0", mkstream=True)
        except redis.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    link.run(f"creating group {group}", create)
