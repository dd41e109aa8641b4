"""Evaluations: each opened once, counted as its scores arrive, and repaired when the broker has lost samples of it."""

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from broker.connection.connection import RunData
from broker.connection.scripts import OTHER_RUN
from broker.evaluations.results import EvalResult, parse_results
from broker.queues.consumer_group import split_calls
from broker.queues.dead_letters import UnusableTask, check_sendable
from broker.queues.images import image_args
from broker.queues.tasks import eval_version
from schemas.errors import BrokerDamaged, InfraError
from schemas.messages import Task
from schemas.run_record import JoinedRun

KEPT_EVALUATIONS = 1000
"""Complete evaluations that the broker keeps, the newest; all are in the run's folder, in evaluations.jsonl."""
SCANNED = 1000
"""Fields of groups that one call of the repair goes through."""


class MendedSamples(NamedTuple):
    """Result of a repair of an evaluation: samples that were queued again, that failed, and that have not ended yet."""

    again: int = 0
    failed: int = 0
    left: int = 0


class Evals(RunData):
    """Evaluations on held-out prompts, each opened once and counted as scores arrive."""

    def open(
        self,
        version: int,
        tasks: Sequence[Task | UnusableTask],
        run: JoinedRun | None = None,
        images: Mapping[str, bytes] | None = None,
    ) -> bool:
        """Queue the tasks of one evaluation, all at once; False if this version's evaluation was opened before.

        Bodies and images are sent first, in parts, so a feeder that dies in between has opened nothing. Samples of a
        task that can't be sent count as failed, with a dead letter. run: the run of the tasks; raises JoinedRun's error
        if the broker has another. images: files by digest. InfraError if the broker keeps losing what was sent.
        """
        run = run or JoinedRun()
        args: list[int | bytes | str] = [version, run.id, KEPT_EVALUATIONS]
        used: dict[str | bytes, str | bytes] = {}
        bodies: dict[int, bytes] = {}
        for task in tasks:
            body, _, letter = check_sendable(task, self._max_bytes)
            if body:
                bodies[task.task_id] = body
            parts = image_args(task if body else None, images or {})
            digests = parts[::2]
            used |= zip(digests, parts[1::2], strict=True)
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
        """Send images or task bodies of an evaluation in parts; False if it was opened before."""
        for part in split_calls(list(items.items())):
            answer = self._connection.run_script("stage_evaluation", version, run.id, what, *part)
            if answer == OTHER_RUN:
                raise run.replaced()
            if not answer:
                return False
        return True

    def mend(self) -> dict[int, MendedSamples]:
        """Queue samples again whose entries the broker has lost, and count those without a body as failed.

        Returns the result for each version whose evaluation is under way.
        """
        mended: dict[int, MendedSamples] = {}
        cursor = b"0"
        while True:
            cursor, *parts = self._connection.run_script("mend_evaluations", cursor, SCANNED)
            for task_id, *counts in zip(parts[::4], parts[1::4], parts[2::4], parts[3::4], strict=True):
                version = eval_version(int(task_id))
                before = mended.get(version, MendedSamples())
                mended[version] = MendedSamples(*(old + int(new) for old, new in zip(before, counts, strict=True)))
            if cursor == b"0":
                return mended

    def samples_left(self, version: int) -> int | None:
        """Count the samples of an evaluation that are neither scored nor failed; None if it was never opened.

        BrokerDamaged if there are outcomes of it all the same.
        """
        key, fields = self._keys.evals, [f"{version}:{name}" for name in ("n", "scored", "failed")]
        counts = self._connection.run_command("reading an evaluation", "hmget", key, fields)
        n, *ended = counts
        if n is None and any(ended):
            raise BrokerDamaged(f"the broker has lost a part of the evaluation of version {version}")
        return None if n is None else int(n) - sum(int(count or 0) for count in ended)

    def read_results(self) -> list[EvalResult]:
        """Return all evaluations by version, including those under way."""
        fields = self._connection.run_command("reading evaluations", "hgetall", self._keys.evals)
        return parse_results(fields)
