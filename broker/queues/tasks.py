"""Tasks for generators, and their results: finished samples, failed samples, tasks given back.

A task that can't be read, or that killed its generator too often, goes to the dead letters. The id of an evaluation
task tells which weight version it is for.
"""

import itertools
import secrets
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter

import msgspec
import structlog

from broker.connection.connection import BLOCK_MS, Connection
from broker.connection.counters import CLOSED, DUPLICATE, add_counts
from broker.connection.keys import GENERATORS
from broker.connection.scripts import OTHER_RUN
from broker.queues.bodies import read_bodies
from broker.queues.consumer_group import ConsumerGroup, Delivery, Read, number, parcels, split_calls
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


class TaskQueue(ConsumerGroup[Task]):
    """Tasks for one generator."""

    renewal, workers = "renew_tasks", "generators"

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
        samples: list[tuple[int, str, int, int, str, str, bytes]] = []
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
                tokens, name = trajectory.sampled_tokens, next(self._body_names)
                images = ",".join({str(image.digest): None for image in trajectory.images}) if trajectory.images else ""
                samples.append((task_id, off_text, trajectory.sample, tokens, name, images, body))
        calls = []
        for parcel in parcels(samples, PARCEL_BYTES):
            arguments: list[str | int] = [self._run.id]
            for (of_task, off_text), group in groupby(parcel, itemgetter(0, 1)):
                parts = [part for sample in group for part in sample[2:6]]
                arguments += (of_task, off_text, len(parts) // 4, *parts)
            calls.append(([part for *_, name, _, body in parcel for part in (name, body)], arguments))
        answers = self._connection.run_script_with_fields("publish_samples", self._keys.bodies, calls)
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
        delivery: Delivery[Task] | None = None,
    ) -> None:
        """Report a sample that could not be produced: it becomes a dead letter, and its group continues without it.

        kind: word under which such samples are counted; nothing was wrong with one that is UNREWARDED, so it makes no
        dead letter. broken_version: the weights' version if its log-probabilities are not finite. trace: as in Score.
        delivery: with which the sample was asked for; the report changes nothing if another generator has the task now.
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
        entry = b"" if delivery is None else delivery.entry_id
        arguments = (task_id, sample, filed, encode(score), self._run.id, entry, self._consumer)
        answer = self._connection.run_script("fail_sample", *arguments)
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

    def _read_bodies(self, entries: list[dict[bytes, bytes]]) -> list[bytes | None]:
        # Bodies of evaluation tasks were sent before their entries, which name them by task id.
        separate = [fields.get(b"t", b"") for fields in entries if fields and b"b" not in fields]
        bodies = dict(zip(separate, read_bodies(self._connection, separate), strict=True))
        return [fields.get(b"b") or bodies.get(fields.get(b"t", b"")) for fields in entries]

    def _deliver(self, read: Read, body: bytes) -> Delivery[Task]:
        stream, (entry, fields), times = read
        task = decode(body, Task, self._max_bytes)
        version = number(fields.get(b"v"))
        if version < 0:
            raise BadMessage(f"its weight version {fields.get(b'v')!r} must be a number of 0 or more")
        again = times != 1 or b"r" in fields
        return Delivery(entry, stream, task, version, again, abs(times) - 1, max(0, number(fields.get(b"r"))))

    def _refuse(self, read: Read, body: bytes | None, reason: str) -> None:
        stream, (entry, fields), times = read
        task_id = number(fields.get(b"t"))
        letter = DeadLetter(source="tasks", reason=reason, deliveries=abs(times), payload=body or b"", task_id=task_id)
        filed = letter_bytes(letter, self._max_bytes)
        self._connection.run_script(
            "fail_task", stream.rpartition(":")[2], entry, "" if task_id < 0 else task_id, filed
        )


def off_version(trajectory: Trajectory) -> bool:
    """Return whether an evaluation's trajectory has tokens of a version other than the evaluated one."""
    if trajectory.kind != "eval":
        return False
    version = eval_version(trajectory.task_id)
    return any(span.version != version for span in trajectory.spans)
