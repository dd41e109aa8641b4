"""Prompt groups on their way through the broker, without the services that handle them."""

from collections.abc import Sequence

from broker.client import Broker
from broker.flow.pipeline import ScoredSample
from broker.flow.trainer_session import TrainerSession
from schemas.codec import Array
from schemas.messages import BatchRecord, GroupRef, Member, Sampling, Score, Span, Task, Trajectory


def make_task(task_id: int, n: int = 2, kind: str = "train") -> Task:
    return Task(task_id=task_id, kind=kind, n=n, sampling=Sampling(), text="1+1=", data={"answer": "2"})


def make_trajectory(task_id: int, sample: int, kind: str = "train", version: int = 0) -> Trajectory:
    return Trajectory(
        run="test",
        task_id=task_id,
        sample=sample,
        kind=kind,
        tokens=Array.of([1, 2, 3], "i4"),
        loss_mask=Array.of([0, 0, 1], "u1"),
        logprobs=Array.of([0, 0, -0.5], "f4"),
        spans=[Span(version, 2, 3)],
        turns=[],
        finish="stop",
        prompt="1+1=",
        completion="2",
        generator="g",
    )


def generate_and_score(broker: Broker, task_id: int, scores: tuple[Score, ...]) -> None:
    """Generate and score the task's samples."""
    queue = broker.task_queue("g")
    (delivery,) = [item for item in queue.read(100, 10) if item.message.task_id == task_id]
    assert queue.publish(task_id, [make_trajectory(task_id, i) for i in range(len(scores))]) == ["ok"] * len(scores)
    queue.release(delivery)
    rewards = broker.score_queue("r")
    results = rewards.read(100, 10)
    assert rewards.publish([(item, scores[item.message.sample]) for item in results]) == ["ok"] * len(scores)


def claim_batch(training: TrainerSession, step: int = 0) -> BatchRecord:
    return make_batch_record(training.claim_scores(1000), step)


def make_batch_record(outcomes: Sequence[ScoredSample], step: int) -> BatchRecord:
    groups: dict[int, list[Member]] = {}
    for outcome in outcomes:
        member = Member(outcome.sample, outcome.scored_id, outcome.trajectory_id or b"")
        groups.setdefault(outcome.task_id, []).append(member)
    return BatchRecord(
        step=step, version=step, new_version=step + 1, groups=[GroupRef(t, m) for t, m in sorted(groups.items())]
    )


def train_record(training: TrainerSession, record: BatchRecord, commit: bool = False) -> BatchRecord:
    """Journal and complete the step of a batch. commit: as if a checkpoint covered it, too."""
    training.journal_batch(record)
    training.complete_step(record)
    if commit:
        training.commit_steps([record])
    return record


def count_entries(broker: Broker) -> dict[str, int]:
    keys = broker.connection.keys
    client = broker.connection.client
    return {
        "tasks": client.xlen(keys.tasks),
        "trajectories": client.xlen(keys.trajectories),
        "bodies": client.hlen(keys.bodies),
        "scored": client.xlen(keys.scored),
        "groups": client.hlen(keys.groups),
        "samples": client.hlen(keys.samples),
        "journal": client.hlen(keys.journal),
    }
