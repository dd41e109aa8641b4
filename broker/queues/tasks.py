"""Tasks for generators, and their results: finished samples, failed samples, tasks given back.

A task that can't be read, or that killed its generator too often, goes to the dead letters. The id of an evaluation
task tells which weight version it is for.
"""

import itertools
import secrets
from collections.abc import Mapping, Sequence

import msgspec
import structlog

from broker.connection.connection import BLOCK_MS, Connection
from broker.connection.counters import CLOSED, DUPLICATE, add_counts
from broker.connection.keys import GENERATORS
from broker.connection.scripts import OTHER_RUN
from broker.connection.stream_pages import Entry
from broker.queues.bodies import NO_BODY, read_bodies
from broker.queues.consumer_group import AT_ONCE, ConsumerGroup, Delivery, number, split_calls
from broker.queues.dead_letters import letter_bytes
from schemas.codec import BadMessage, decode, encode
from schemas.errors import printable
from schemas.messages import UNREWARDED, DeadLetter, Score, Task, Trajectory
from schemas.run_record import JoinedRun

EVAL_BASE = 1 << 32
"""Ids of evaluation tasks are (version + 1) * EVAL_BASE + index, above all training tasks."""


def eval_task_id(version: int, index: int) -> int:
    """Return the id of the task of a held-out prompt in the evaluation of ``version``."""
    return (version + 1) * EVAL_BASE + index


def eval_version(task_id: int) -> int:
    """Return the weight version that an evaluation task is for."""
    return task_id // EVAL_BASE - 1


PARCEL_BYTES = 256 << 10
"""Bytes of bodies in one transaction; above this, the server copies them from memory instead of its cache."""

log = structlog.get_logger()


class TakenEvaluations(msgspec.Struct, frozen=True, gc=False):
    """Evaluation tasks that a generator has taken.

    pending: version of the next task that no generator has taken, -1 if there is none. opened: whether the evaluation
    of the requested version was opened.
    """

    pending: int
    opened: bool
    taken: list[Delivery[Task]]


class TaskQueue(ConsumerGroup):
    """Tasks for one generator."""

    renewal = "renew_tasks"

    def __init__(
        self, connection: Connection, consumer: str, max_deliveries: int, max_bytes: int, run: JoinedRun | None = None
    ) -> None:
        """run: the generator's. Once the broker has another run, samples are rejected with the error of JoinedRun."""
        streams = [connection.keys.eval_tasks, connection.keys.tasks]
        super().__init__(connection, streams, GENERATORS, consumer, max_deliveries, max_bytes)
        self._run = run or JoinedRun()
        # Any thread may take the next one.
        self._body_names = map(f"{secrets.token_hex(8)}.{{}}".format, itertools.count())

    def read(self, count: int, block_ms: int = BLOCK_MS, evaluations: bool = True) -> list[Delivery[Task]]:
        """Read up to ``count`` tasks of each kind; [] after ``block_ms`` without any.

        evaluations: whether to read new evaluation tasks, too; tasks that this generator had before come in any case.
        """
        return self._decode(self._read(count, block_ms, None if evaluations else [self._keys.tasks]))

    def take_evaluations(self, version: int, count: int, late: bool = False) -> TakenEvaluations:
        """Take up to ``count`` evaluation tasks for ``version``, with ``late`` also for older ones. Never waits."""
        stream = self._keys.eval_tasks
        pending, opened, entries = self._connection.run_script(
            "take_evaluations", self._consumer, count, version, int(late)
        )
        pairs = [(entry, dict(zip(fields[::2], fields[1::2], strict=True))) for entry, fields in entries]
        taken = self._take([(stream, pair) for pair in pairs])
        return TakenEvaluations(
            int(pending), bool(opened), self._decode([(stream, entry, 1) for stream, entry in taken])
        )

    def claim_stale(self, lease_s: float, count: int) -> list[Delivery[Task]]:
        """Claim tasks of generators that were silent for longer than their lease."""
        return self._decode(self._claim_stale(lease_s, count))

    def find_missing(self, task: Task) -> list[int]:
        """List the indices of the task's samples that are not published yet."""
        fields = [f"{task.task_id}:{sample}" for sample in range(task.n)]
        present = self._connection.run_command("looking for missing samples", "hmget", self._keys.samples, fields)
        return [sample for sample, entry in enumerate(present) if entry is None]

    def publish(self, task_id: int, trajectories: Sequence[Trajectory]) -> list[str]:
        """Publish finished samples of a task; return a verdict for each. The last sample completes the task.

        ok; dup: it was published before; closed: its group has ended; images: one of its images is not stored with its
        group (by ``keep_images`` or with the task); failed: it is over broker.max_message_bytes and became a dead
        letter, and its group continues without it.
        """
        return self.publish_all([(task_id, trajectories)])[0]

    def publish_all(self, results: Sequence[tuple[int, Sequence[Trajectory]]]) -> list[list[str]]:
        """Publish samples of several tasks in one round trip."""
        refused: set[tuple[int, int]] = set()
        parcel = _Parcel(self._run.id)
        parcels = [parcel]
        for task_id, trajectories in results:
            off = [item.sample for item in trajectories if off_version(item)]
            off_text = f",{','.join(map(str, off))}," if off else ""
            for trajectory in trajectories:
                try:
                    body = encode(trajectory, self._max_bytes)
                except BadMessage as error:
                    self.fail_sample(task_id, trajectory.sample, str(error))
                    refused.add((task_id, trajectory.sample))
                    continue
                if not parcel.has_room(len(body)):
                    parcel = _Parcel(self._run.id)
                    parcels.append(parcel)
                tokens = trajectory.sampled_tokens
                images = ",".join({str(image.digest): None for image in trajectory.images}) if trajectory.images else ""
                parcel.add(task_id, off_text, trajectory.sample, tokens, next(self._body_names), images, body)
        answers = self._connection.run_script_with_fields(
            "publish_samples",
            self._keys.bodies,
            [(parcel.bodies, parcel.arguments()) for parcel in parcels if parcel.samples],
        )
        said = [word.decode() for words in answers for word in words]
        if OTHER_RUN.decode() in said:
            raise self._run.replaced()
        add_counts(self._connection, {f"{DUPLICATE}:publish": said.count("dup"), CLOSED: said.count("closed")})
        following = iter(said)
        return [
            ["failed" if refused and (task_id, item.sample) in refused else next(following) for item in trajectories]
            for task_id, trajectories in results
        ]

    def keep_images(self, task_id: int, images: Mapping[str, bytes]) -> None:
        """Store further images of an episode by digest, for as long as its prompt group exists."""
        parts = split_calls(list(images.items()))
        answers = self._connection.run_scripts("keep_images", [[task_id, self._run.id, *part] for part in parts])
        if OTHER_RUN in answers:
            raise self._run.replaced()

    def fail_sample(
        self,
        task_id: int,
        sample: int,
        reason: str,
        broken_version: int = -1,
        kind: str = "workflow",
        trace: bytes = b"",
    ) -> None:
        """Report a sample that could not be produced: it becomes a dead letter, and its group continues without it.

        kind: word under which such samples are counted; nothing was wrong with one that is UNREWARDED, so it makes no
        dead letter. broken_version: the weights' version if its log-probabilities are not finite. trace: as in Score.
        """
        letter = DeadLetter(
            source="generator", reason=reason, deliveries=1, payload=b"", task_id=task_id, sample=sample
        )
        score = Score(
            status="error",
            reason=printable(reason),
            broken_version=broken_version,
            failure=kind if broken_version < 0 else "not_finite",
            trace=trace,
        )
        filed = b"" if kind == UNREWARDED else letter_bytes(letter, self._max_bytes)
        answer = self._connection.run_script("fail_sample", task_id, sample, filed, encode(score), self._run.id)
        if answer == OTHER_RUN:
            raise self._run.replaced()

    def return_task(self, delivery: Delivery[Task], task: Task, fruitless: bool = False) -> bool:
        """Return an unfinished task, with its partial samples, for another generator to take at once.

        If it would be too large, the largest partial samples are left out. fruitless: whether this counts in
        ``Delivery.fruitless``. False if the task is done or belongs to another generator already.
        """
        times = delivery.fruitless + fruitless
        answer = self._connection.run_script(
            "return_task", task.task_id, delivery.entry_id, self._encode_with_most(task), self._consumer, times
        )
        self._release(delivery.stream, delivery.entry_id)
        return bool(answer == b"ok")

    def _encode_with_most(self, task: Task) -> bytes:
        """Encode the task, without its largest partial samples if it would be too large."""
        while True:
            try:
                return encode(task, self._max_bytes)
            except BadMessage as error:
                if not task.partials:
                    raise
                largest = max(task.partials, key=lambda partial: partial.size)
                reason, task_id, sample = str(error), task.task_id, largest.sample
                log.warning("a partial sample could not be handed over", task_id=task_id, sample=sample, reason=reason)
                task = msgspec.structs.replace(task, partials=[item for item in task.partials if item is not largest])

    def release(self, delivery: Delivery[Task]) -> None:
        """Stop renewing the lease of a task that this worker has finished."""
        self._release(delivery.stream, delivery.entry_id)

    def _decode(self, entries: list[tuple[str, Entry, int]]) -> list[Delivery[Task]]:
        deliveries = []
        # Bodies of evaluation tasks were sent before their entries, which name them by task id.
        separate = [fields.get(b"t", b"") for _, (_, fields), _ in entries if fields and b"b" not in fields]
        bodies = dict(zip(separate, read_bodies(self._connection, separate), strict=True))
        for stream, (entry_id, fields), times in entries:
            if not fields:
                self._release(stream, entry_id)
                continue
            body = fields.get(b"b") or bodies.get(fields.get(b"t", b""))
            try:
                if body is None:
                    raise BadMessage(NO_BODY)
                if abs(times) > self._max_deliveries:
                    raise BadMessage(f"delivered {abs(times)} times, its generators died or stalled each time")
                task = decode(body, Task, self._max_bytes)
                version = number(fields.get(b"v"))
                if version < 0:
                    raise BadMessage(f"its weight version {fields.get(b'v')!r} must be a number of 0 or more")
            except BadMessage as error:
                self._fail_task(stream, entry_id, fields, body, times, str(error))
                continue
            again = times != 1 or b"r" in fields
            fruitless = max(0, number(fields.get(b"r")))
            deliveries.append(Delivery(entry_id, stream, task, version, again, abs(times) - 1, fruitless))
        return deliveries

    def _fail_task(
        self, stream: str, entry_id: bytes, fields: dict[bytes, bytes], body: bytes | None, times: int, reason: str
    ) -> None:
        task_id = number(fields.get(b"t"))
        letter = DeadLetter(source="tasks", reason=reason, deliveries=abs(times), payload=body or b"", task_id=task_id)
        task = "" if task_id < 0 else task_id
        self._connection.run_script(
            "fail_task", stream.rpartition(":")[2], entry_id, task, letter_bytes(letter, self._max_bytes)
        )
        self._release(stream, entry_id)


class _Parcel:
    """Samples for one call of publish_samples, task by task, with their bodies by name."""

    def __init__(self, run: str) -> None:
        self.bodies: list[str | bytes] = []
        self.samples = 0
        self._run = run
        self._bytes = 0
        self._tasks: list[tuple[int, str, list[str | int]]] = []

    def has_room(self, size: int) -> bool:
        return not self.samples or (self.samples < AT_ONCE and self._bytes + size <= PARCEL_BYTES)

    def add(
        self, task_id: int, off_version: str, sample: int, tokens: int, name: str, images: str, body: bytes
    ) -> None:
        """Add a sample. off_version: samples of its task with tokens of another version. images: digests."""
        if not self._tasks or self._tasks[-1][0] != task_id:
            self._tasks.append((task_id, off_version, []))
        self._tasks[-1][2].extend((sample, tokens, name, images))
        self.bodies += (name, body)
        self.samples += 1
        self._bytes += len(body)

    def arguments(self) -> list[str | int]:
        arguments: list[str | int] = [self._run]
        for task_id, off, samples in self._tasks:
            arguments += (task_id, off, len(samples) // 4, *samples)
        return arguments


def off_version(trajectory: Trajectory) -> bool:
    """Return whether an evaluation's trajectory has tokens of a version other than the evaluated one."""
    if trajectory.kind != "eval":
        return False
    version = eval_version(trajectory.task_id)
    return any(span.version != version for span in trajectory.spans)
