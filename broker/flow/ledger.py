"""The ledger: which prompt groups are in the pipeline, and how all others ended.

A slot is charged when a group is admitted and returns when the group was trained, dropped or failed; nothing else
moves it. Invariant: admitted == active + trained + dropped + failed. Task ids below the cursor were admitted, or
skipped by the curriculum; those to be admitted again (``readmit``) count as not admitted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import msgspec
import redis

from broker.connection.connection import BLOCK_MS, RunData
from broker.connection.scripts import OTHER_RUN
from broker.flow.run_control import ControlState, parse_settings, with_prefix
from broker.queues.consumer_group import split_calls
from broker.queues.dead_letters import UnusableTask, check_sendable
from broker.queues.images import image_args
from schemas.config.run import slots_problem
from schemas.errors import RefusedError
from schemas.messages import Task
from schemas.run_record import JoinedRun

AdmissionAnswer = Literal["ok", "again", "full", "paused", "done", "moved", "starting"]


@dataclass(frozen=True)
class SkippedTask:
    """A position of the prompt order that the curriculum skips permanently: its task is never made."""

    task_id: int
    n: int = 0


@dataclass(frozen=True)
class Admission:
    """Result of an attempt to admit. answer: the first that is not ok. next: the task id to admit next.

    ``again`` means that a task was to be skipped, but was admitted before and has to be made again.

    admitted: ids of the admitted tasks; if others have to be made again first, tasks after a rejected one may be among
    them. unusable: admitted tasks whose groups failed at once. skipped: ids of the skipped tasks.
    """

    answer: AdmissionAnswer
    next: int
    admitted: Sequence[int]
    unusable: dict[int, UnusableTask] = field(default_factory=dict)
    skipped: Sequence[int] = ()


@dataclass(frozen=True)
class LedgerState:
    """The ledger at one moment, most fields as the broker names them. ``dropped``, ``failed`` count groups by reason.

    capacity: number of slots. readmit: groups waiting to be admitted again. skipped: positions that the curriculum
    skipped. uncommitted_steps: those that no checkpoint covers yet; max_uncommitted: their limit. broker_lifetime:
    changes when the broker is rebuilt. cause: why the run failed. run_id, run_since: its identity
    (schemas/run_record.py), and when its first attempt began. control: users' orders. settings: those that users
    changed. counters: of handled faults (broker/connection/counters.py). tokens: sampled tokens that have ended, by
    how: trained, evaluation, made_again (generated twice, or lost and generated again), else the reason for which their
    group was not trained. devices: seconds of devices by role and use (broker/device_clock.py), and ``held``, all by
    the broker's clock.
    """

    state: str = "starting"
    paused: bool = False
    step: int = 0
    version: int = 0
    steps: int = 0
    batch: int = 0
    staleness: int = 0
    cursor: int = 0
    active: int = 0
    readmit: int = 0
    capacity: int = 0
    admitted: int = 0
    skipped: int = 0
    trained: int = 0
    uncommitted_steps: int = 0
    max_uncommitted: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    samples_published: int = 0
    samples_trained: int = 0
    samples_dropped: int = 0
    samples_failed: int = 0
    tokens_generated: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    devices: dict[str, dict[str, float]] = field(default_factory=dict)
    dead_letters: int = 0
    started: float = 0.0
    leader_term: int = 0
    broker_lifetime: str = ""
    cause: str = ""
    run_id: str = ""
    run_since: float = 0.0
    control: ControlState = field(default_factory=ControlState)
    settings: dict[str, int | float] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)

    @property
    def balanced(self) -> bool:
        """Return whether the invariant holds and every admitted id is accounted for."""
        ended = self.trained + sum(self.dropped.values()) + sum(self.failed.values())
        return self.admitted == self.active + ended == self.cursor - self.readmit - self.skipped

    def describe(self) -> str:
        """Format the invariant with its numbers."""
        dropped, failed = sum(self.dropped.values()), sum(self.failed.values())
        return (
            f"{self.admitted} admitted = {self.active} active + {self.trained} trained"
            f" + {dropped} dropped + {failed} failed"
        )

    @property
    def tokens_in_flight(self) -> int:
        """Number of published tokens whose group has not ended."""
        return self.tokens_generated - sum(self.tokens.values())

    @property
    def live_groups(self) -> int:
        """Number of prompt groups whose data the broker holds."""
        return self.active + self.uncommitted_steps * self.batch

    @property
    def live_bound(self) -> int:
        """Most prompt groups whose data the broker may hold: slots, and the steps between two checkpoints."""
        return self.capacity + self.max_uncommitted * self.batch


class Ledger(RunData):
    """Admits tasks, changes the control state, and reads the ledger."""

    def admit(self, task: Task | UnusableTask) -> Admission:
        """Charge a slot and queue the task, if it is the next one.

        A task that can't be sent is admitted as a failed group, with a dead letter, and the run continues.
        """
        return self.admit_all([task])

    def admit_all(
        self,
        tasks: Sequence[Task | UnusableTask | SkippedTask],
        run: JoinedRun | None = None,
        prompts: Mapping[int, int] | None = None,
        images: Mapping[str, bytes] | None = None,
    ) -> Admission:
        """Admit tasks that follow one another, in one round trip.

        run: the run of these tasks; the error of JoinedRun if the broker has another one. prompts: by task id, the
        number of the prompt in whose statistics the outcome counts. images: bytes of the tasks' images by digest.
        """
        run = run or JoinedRun()
        parts: list[tuple[bytes | str | int, ...]] = []
        unusable = []
        nothing = b"", None, b""
        for task in tasks:
            body, wrong, letter = nothing if isinstance(task, SkippedTask) else check_sendable(task, self._max_bytes)
            prompt = "" if prompts is None else prompts.get(task.task_id, "")
            image_parts = image_args(task if body else None, images or {})
            parts.append((task.task_id, body, task.n, letter, prompt, len(image_parts) // 2, *image_parts))
            unusable.append(wrong)
        answers = self._connection.run_scripts("admit_tasks", [[run.id, *call] for call in split_calls(parts)])
        if any(OTHER_RUN in words for words in answers):
            raise run.replaced()
        said = [word.decode() for words in answers for word in words[:-1]]
        # A broker without a trainer replies once for a call, not for each task.
        refusal = next((word for word in said if word not in ("ok", "skipped")), "ok")
        words = dict(zip((task.task_id for task in tasks), said, strict=refusal != "starting"))
        skipped, admitted = ([one for one, word in words.items() if word == kind] for kind in ("skipped", "ok"))
        failed = {wrong.task_id: wrong for wrong in unusable if wrong is not None and wrong.task_id in admitted}
        return Admission(cast(AdmissionAnswer, refusal), int(answers[-1][-1]), admitted, failed, skipped)

    def read_prompts(self, prompts: Sequence[int]) -> list[bytes]:
        """Read the statistics of prompts by number, four bytes each, or fewer if nothing is known."""

        def read(client: redis.Redis) -> list[bytes]:
            pipe = client.pipeline(transaction=False)
            for prompt in prompts:
                pipe.getrange(self._keys.prompts, 4 * prompt, 4 * prompt + 3)
            found: list[bytes] = pipe.execute()
            return found

        return self._connection.run("reading the statistics of prompts", read) if prompts else []

    def change_position(self) -> bytes:
        """Return the current position in the stream of changes: read it before the ledger, for ``wait_change``."""
        return self._connection.newest_entry("looking for changes", self._keys.changes)

    def wait_change(self, position: bytes, timeout_ms: int = BLOCK_MS) -> None:
        """Wait until slots or control state have changed since ``position``, or until the timeout."""
        self._connection.run_command("waiting for a slot", "xread", {self._keys.changes: position}, 1, timeout_ms)

    def set_run_state(self, name: Literal["state", "cause"], value: str) -> None:
        """Set the state of the run, or the cause of its failure."""
        self._connection.run_script("set_run_state", name, value)

    def change_settings(self, values: Mapping[str, float | None]) -> bool:
        """Change settings of the running run, all or none; None restores the configured value.

        False if no trainer has started yet. RefusedError if fewer slots would be left than a batch needs, or if batch
        or staleness is far above the configured one. The change survives restarts of every service. If it leaves fewer
        slots than groups, the next admission withdraws those that no generator has taken, to admit them again later.
        """
        args = [arg for name, value in values.items() for arg in (name, "" if value is None else repr(value))]
        answer = self._connection.run_script("change_settings", *args)
        if isinstance(answer, list) and len(answer) == 4:
            name, given, most, configured = (value.decode() for value in answer)
            raise RefusedError(f"{name} {given} is not allowed: at most {most} in a run configured with {configured}")
        if isinstance(answer, list):
            raise RefusedError(str(slots_problem(*(int(value) for value in answer))))
        return bool(answer == b"ok")

    def count_live_samples(self) -> int:
        """Count the published training samples of groups that hold a slot."""
        active = self._connection.run_command("reading slots", "zrange", self._keys.slots, 0, -1)
        samples = self._connection.run_command("reading samples", "hgetall", self._keys.samples)
        held = set(active)
        return sum(entry != b"-" and sample.partition(b":")[0] in held for sample, entry in samples.items())

    def read_state(self) -> LedgerState:
        """Read the whole ledger at one moment."""
        return msgspec.convert(ledger_fields(self._connection.run_script("read_pipeline")), LedgerState, strict=False)


def ledger_fields(raw: Sequence[Any]) -> dict[str, Any]:
    """Return the fields of a LedgerState, from the reply of the script read_pipeline."""
    control, counts = pairs(raw[1]), pairs(raw[2])
    return {
        **control,
        **counts,
        "active": len(raw[3]) // 2,
        "readmit": len(raw[4]),
        "capacity": control.get("slots", 0),
        "uncommitted_steps": raw[5],
        "dropped": with_prefix(counts, "dropped:"),
        "failed": with_prefix(counts, "failed:"),
        "samples_published": counts.get("published", 0),
        "tokens": with_prefix(counts, "tokens:"),
        "devices": _device_seconds(with_prefix(counts, "device:")),
        "control": ControlState.parse(pairs(raw[6])),
        "settings": parse_settings(control),
        "counters": pairs(raw[7]),
    }


def pairs(flat: Sequence[bytes]) -> dict[str, str]:
    """Parse the flat list in which scripts return a hash: field, value, field, value."""
    return {flat[at].decode(): flat[at + 1].decode() for at in range(0, len(flat), 2)}


def _device_seconds(milliseconds: dict[str, str]) -> dict[str, dict[str, float]]:
    seconds: dict[str, dict[str, float]] = {}
    for name, value in sorted(milliseconds.items()):
        role, _, use = name.partition(":")
        seconds.setdefault(role, {})[use] = int(value) / 1000
    return seconds
