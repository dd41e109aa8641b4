"""Trajectories for reward services, and their scores.

A trajectory that can't be read, or that killed its reward service too often, goes to the dead letters, and its sample
is excluded; it is never scored 0.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from broker.connection.connection import BLOCK_MS, Connection
from broker.connection.counters import DUPLICATE, add_counts
from broker.connection.keys import REWARD
from broker.queues.bodies import read_bodies
from broker.queues.consumer_group import ConsumerGroup, Delivery, Read, number, split_calls
from broker.queues.dead_letters import LIMIT, letter_bytes
from broker.queues.tasks import EVAL_BASE
from schemas.codec import BadMessage, decode, encode
from schemas.messages import DeadLetter, Score, Trajectory, UncheckedTrajectory


class ScoreQueue(ConsumerGroup[Trajectory]):
    """Trajectories for one reward service."""

    renewal, workers = "renew_trajectories", "reward services"

    def __init__(self, connection: Connection, consumer: str, max_deliveries: int, max_bytes: int) -> None:
        super().__init__(connection, [connection.keys.trajectories], REWARD, consumer, max_deliveries, max_bytes)

    def read(self, count: int, block_ms: int = BLOCK_MS) -> list[Delivery[Trajectory]]:
        """Read up to ``count`` trajectories; [] after ``block_ms`` without any."""
        return self._decode(self._read(count, block_ms))

    def publish(self, results: Sequence[tuple[Delivery[Trajectory], Score]]) -> list[str]:
        """Publish scores; a failed one excludes its sample and leaves a dead letter, never a reward of 0."""
        keys: list[bytes] = []
        parts: list[tuple[bytes | str | int, ...]] = []
        for delivery, score in results:
            keys.append(delivery.entry_id)
            message = delivery.message
            sent, body = self._fitting(score)
            counts = "" if message.task_id < EVAL_BASE else _eval_counts(message, sent)
            letter = self._dead_score(message, sent)
            parts.append((delivery.entry_id, message.task_id, message.sample, body, counts, letter))
        answers = self._connection.run_scripts("publish_scores", split_calls(parts)) if parts else []
        self._held[self._keys.trajectories].difference_update(keys)
        said = [word.decode() for words in answers for word in words]
        add_counts(self._connection, {f"{DUPLICATE}:score": said.count("dup")})
        return said

    def give_back(self, deliveries: Sequence[Delivery[Trajectory]]) -> None:
        """Return trajectories that this service has not begun to score, for another one to take at once."""
        calls: list[list[Any]] = [
            [delivery.entry_id, delivery.message.task_id, delivery.message.sample, self._consumer]
            for delivery in deliveries
        ]
        if calls:
            self._connection.run_scripts("return_trajectory", calls)
        for delivery in deliveries:
            self._release(delivery.stream, delivery.entry_id)

    def _fitting(self, score: Score) -> tuple[Score, bytes]:
        """Return a score and its body; a failed score if it is too large to be sent."""
        try:
            return score, encode(score, self._max_bytes)
        except BadMessage as error:
            failed = Score(status="error", reason=str(error))
            return failed, encode(failed)

    def _dead_score(self, trajectory: Trajectory, score: Score) -> bytes:
        """Return the dead letter of a sample whose reward failed, otherwise b""."""
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

    def _read_bodies(self, entries: list[dict[bytes, bytes]]) -> list[bytes | None]:
        return read_bodies(self._connection, [fields.get(b"b", b"") for fields in entries])

    def _deliver(self, read: Read, body: bytes) -> Delivery[Trajectory]:
        stream, (entry, fields), _ = read
        task_id, sample = number(fields.get(b"t")), number(fields.get(b"s"))
        trajectory = decode(body, UncheckedTrajectory, self._max_bytes)
        if (trajectory.task_id, trajectory.sample) != (task_id, sample):
            raise BadMessage(f"is sample {trajectory.task_id}:{trajectory.sample}, its entry says {task_id}:{sample}")
        return Delivery(entry, stream, trajectory)

    def _refuse(self, read: Read, body: bytes | None, reason: str) -> None:
        _, (entry, fields), times = read
        task_id, sample = number(fields.get(b"t")), number(fields.get(b"s"))
        payload = fields.get(b"b", b"") if body is None else body
        letter = DeadLetter(
            source="trajectories",
            reason=reason,
            deliveries=abs(times),
            payload=payload,
            task_id=task_id,
            sample=sample,
        )
        filed = letter_bytes(letter, self._max_bytes)
        if body is None and task_id < EVAL_BASE:
            # Filed unless its group has ended, or the broker has lost data, which the trainer finds out.
            named = f"{task_id}:{sample}" if task_id >= 0 and sample >= 0 else ""
            self._connection.run_script("dead_letter", entry, filed, named)
        else:
            # No trainer looks for lost samples of an evaluation, which would never complete.
            failed = encode(Score(status="error", reason=reason))
            self._connection.run_script("publish_scores", entry, task_id, sample, failed, "", filed)


def outcomes_in(fields: Mapping[bytes, bytes]) -> list[tuple[int, bytes, bytes]]:
    """List the outcomes in an entry of the scores: index, place (``-`` for none) and encoded score of each sample."""
    outcomes: list[tuple[int, bytes, bytes]] = []
    for name, body in fields.items():
        sample, colon, place = name.partition(b":")
        if colon and sample.isdigit():
            outcomes.append((int(sample), place, body))
    return outcomes


def _eval_counts(trajectory: Trajectory, score: Score) -> str:
    """Format what an evaluation counts: reward, sampled tokens, and whether the sample is correct; "" if it failed."""
    if score.status != "ok":
        return ""
    return f"{score.reward!r} {trajectory.sampled_tokens} {int(score.correct)}"
