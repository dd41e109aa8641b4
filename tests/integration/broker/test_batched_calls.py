"""Many at once is the same as one by one: admission, publishing, scoring and fetching in batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from broker.client import Broker
from broker.flow.trainer_session import _runs
from broker.queues.consumer_group import AT_ONCE
from deploy.bench.workload import PipelineShape, TrajectoryPool, begin
from schemas.codec import encode
from schemas.messages import Score

pytestmark = pytest.mark.integration

POOL = TrajectoryPool(16)
GROUPS, SAMPLES = 20, 8


def fill(broker: Broker) -> list[bytes]:
    """Admit and publish everything; returns the entries of the trajectories, in order."""
    begin(broker.trainer_session(), PipelineShape(batch=GROUPS, staleness=0))
    admission = broker.ledger.admit_all([POOL.task(task_id, SAMPLES) for task_id in range(GROUPS)])
    assert (admission.answer, admission.next) == ("ok", GROUPS)
    queue = broker.task_queue("g")
    results = [
        (item.message.task_id, [POOL.trajectory(item.message, s, 0) for s in range(SAMPLES)])
        for item in queue.read(GROUPS)
    ]
    assert queue.publish_all(results) == [["ok"] * SAMPLES] * GROUPS
    return [entry for entry, _ in broker.connection.client.xrange(broker.connection.keys.trajectories)]


def test_admission_stops_at_the_first_task_there_is_no_room_for(broker: Broker) -> None:
    begin(broker.trainer_session(), PipelineShape(batch=2, staleness=0))
    admission = broker.ledger.admit_all([POOL.task(task_id, 2) for task_id in range(4)])
    assert (admission.answer, admission.next) == ("full", 2)
    assert broker.ledger.admit_all([POOL.task(0, 2)]).next == 2
    assert broker.ledger.read_state().admitted == 2


def test_a_sample_twice_in_one_call_is_published_once(broker: Broker) -> None:
    begin(broker.trainer_session(), PipelineShape(batch=1, staleness=0))
    broker.ledger.admit(POOL.task(0, 2))
    (delivery,) = broker.task_queue("g").read(1)
    first, second = (POOL.trajectory(delivery.message, sample, 0) for sample in (0, 1))
    assert broker.task_queue("g").publish(0, [first, first, second]) == ["ok", "dup", "ok"]
    assert broker.connection.client.xlen(broker.connection.keys.trajectories) == 2
    assert broker.ledger.read_state().samples_published == 2
    assert broker.connection.client.xlen(broker.connection.keys.tasks) == 0


def test_more_scores_than_fit_one_call_are_each_published_once(broker: Broker) -> None:
    count = len(fill(broker))
    assert count > 2 * AT_ONCE
    queue = broker.score_queue("r")
    results = [(item, Score(reward=1.0)) for item in queue.read(count)]
    assert queue.publish([*results, results[0]]) == ["ok"] * count + ["dup"]
    assert queue.publish(results) == ["dup"] * count
    assert broker.connection.client.xlen(broker.connection.keys.scored) == count
    assert broker.connection.client.xpending(broker.connection.keys.trajectories, "reward")["pending"] == 0


def test_no_call_of_a_script_holds_more_bytes_than_it_may(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 3 * len(encode(POOL.trajectory(POOL.task(0, SAMPLES), 0, 0)))
    monkeypatch.setattr("broker.queues.consumer_group.BYTES_AT_ONCE", most)
    real, sent = broker.connection.run_scripts, dict[str, list[list[int]]]()

    def run_scripts(name: str, calls: Sequence[Sequence[Any]]) -> list[Any]:
        sent[name] = [[len(item) for item in call if isinstance(item, bytes)] for call in calls]
        return real(name, calls)

    monkeypatch.setattr(broker.connection, "run_scripts", run_scripts)
    fill(broker)
    failed = Score(status="error", reason="no")
    queue = broker.score_queue("r")
    assert queue.publish([(item, failed) for item in queue.read(GROUPS * SAMPLES)]) == ["ok"] * GROUPS * SAMPLES
    for name in ("publish_samples", "publish_scores"):
        assert len(sent[name]) > GROUPS
        assert max(map(sum, sent[name])) <= most
    assert broker.ledger.read_state().dead_letters == GROUPS * SAMPLES


def test_trajectories_are_fetched_in_the_order_asked_for(broker: Broker) -> None:
    ids = fill(broker)
    asked = [ids[9], b"5-0", ids[3], *ids[100:140], ids[4], ids[3]]
    broker.connection.client.xdel(broker.connection.keys.trajectories, ids[110])
    found = broker.trainer_session().fetch_trajectories(asked)
    wanted = [None if entry in (b"5-0", ids[110]) else divmod(ids.index(entry), SAMPLES) for entry in asked]
    assert [body and (body.task_id, body.sample) for body in found] == wanted
    assert broker.trainer_session().fetch_trajectories([]) == []


def test_entries_without_a_gap_are_read_as_one_stretch() -> None:
    assert _runs([b"7-0", b"7-1", b"7-2", b"7-4", b"8-5", b"8-4", b"8-5"]) == [
        (b"7-0", b"7-2"),
        (b"7-4", b"7-4"),
        (b"8-5", b"8-5"),
        (b"8-4", b"8-5"),
    ]
