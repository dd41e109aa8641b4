"""The keys that hold the pipeline grow up to a bound, the most live groups, and no further."""

from __future__ import annotations

from typing import Any

import pytest

from broker.client import Broker
from broker.evaluations import store
from broker.flow.pipeline import ScoredSample
from broker.queues.tasks import eval_task_id
from schemas.messages import BatchRecord, Score
from tests.support.broker.prompt_groups import make_batch_record, make_task, make_trajectory
from tests.support.broker.trainer_sessions import take_over
from tools.soak import length_bounds

pytestmark = pytest.mark.integration

BATCH, STALENESS, UNCOMMITTED, SAMPLES = 2, 1, 3, 2


def test_keys_of_the_pipeline_stay_within_the_most_live_groups(broker: Broker) -> None:
    training = take_over(broker, batch=BATCH, staleness=STALENESS, max_uncommitted=UNCOMMITTED)
    generators, rewards = broker.task_queue("g"), broker.score_queue("r")
    keys, client, next_task = broker.connection.keys, broker.connection.client, 0
    size = {"trajectories": client.xlen, "scored": client.xlen}
    done, waiting, found = list[BatchRecord](), list[ScoredSample](), dict[str, int]()
    for step in range(4 * UNCOMMITTED):
        admission = broker.ledger.admit_all([make_task(task) for task in range(next_task, next_task + 4 * BATCH)])
        next_task = admission.next
        for delivery in generators.read(100, 10):
            task = delivery.message.task_id
            generators.publish(task, [make_trajectory(task, sample) for sample in range(SAMPLES)])
        rewards.publish([(item, Score(reward=1.0)) for item in rewards.read(100, 10)])
        state = broker.ledger.read_state()
        bounds = length_bounds(state.live_bound, SAMPLES, UNCOMMITTED)
        for name in bounds:
            count: Any = size.get(name, client.hlen)(getattr(keys, name))
            assert count <= bounds[name], name
            found[name] = max(found.get(name, 0), count)
        waiting += training.claim_scores(1000)
        record = make_batch_record(waiting[: BATCH * SAMPLES], step)
        del waiting[: BATCH * SAMPLES]
        training.journal_batch(record)
        training.complete_step(record)
        done.append(record)
        if len(done) == UNCOMMITTED:
            training.commit_steps(done)
            done.clear()
    fields = 4 * (BATCH * (STALENESS + 1) + (UNCOMMITTED - 1) * BATCH)
    assert fields <= found["groups"] <= fields + 1, "the bound, but for the step whose commit is due"
    assert found["bodies"] == SAMPLES * fields / 4


def test_the_broker_keeps_the_newest_evaluations_and_those_under_way(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "KEPT_EVALUATIONS", 3)
    take_over(broker)
    generators, rewards, lengths = broker.task_queue("g"), broker.score_queue("r"), list[int]()
    for version in range(9):
        task = eval_task_id(version, 0)
        assert broker.evals.open(version, [make_task(task, n=1, kind="eval")])
        generators.publish(task, [make_trajectory(task, 0, kind="eval", version=version)])
        # The first one is never scored.
        rewards.publish([(item, Score(reward=1.0)) for item in rewards.read(10, 10) if version])
        count: Any = broker.connection.client.hlen(broker.connection.keys.evals)
        lengths.append(count)
    assert [result.version for result in broker.evals.read_results()] == [0, 6, 7, 8]
    assert lengths[-1] == lengths[-2] == lengths[-3]
