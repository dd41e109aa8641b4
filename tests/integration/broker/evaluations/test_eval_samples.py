"""Samples of evaluations on a real server, from the reward service to who writes them down."""

from __future__ import annotations

import pytest

from broker.client import Broker
from broker.evaluations.samples import COMPLETION
from broker.queues.tasks import eval_task_id
from schemas.messages import Score
from tests.support.trainer.trajectories import make_trajectory

pytestmark = pytest.mark.integration


def test_samples_wait_until_they_are_written_and_no_longer(broker: Broker) -> None:
    samples = broker.eval_samples
    samples.keep(
        [(make_trajectory(eval_task_id(4, 7), k), Score(reward=0.5, components={"exact": 1.0})) for k in range(3)]
    )
    samples.keep([(make_trajectory(eval_task_id(4, 8), 0), Score(status="error", reason="it raised"))])
    found = samples.take("0-0", "")
    assert [(line["version"], line["index"], line["sample"]["sample"]) for _, line in found] == [
        (4, 7, 0),
        (4, 7, 1),
        (4, 7, 2),
        (4, 8, 0),
    ]
    assert found[0][1]["sample"]["terms"] == {"exact": 1.0}
    assert found[3][1]["sample"]["reward"] is None
    assert len(samples.take(found[1][0], found[1][0])) == 2
    assert broker.connection.client.xlen(broker.connection.keys.eval_samples) == 2
    assert samples.take(found[3][0], found[3][0]) == []
    assert broker.connection.client.xlen(broker.connection.keys.eval_samples) == 0


def test_a_long_text_is_cut_and_what_is_no_sample_left_out(broker: Broker) -> None:
    long = make_trajectory(eval_task_id(0, 0), 0)
    fields = {name: getattr(long, name) for name in long.__struct_fields__ if name != "schema"}
    broker.eval_samples.keep([(type(long)(**{**fields, "completion": "x" * 99_999}), Score(reward=1.0))])
    broker.connection.client.xadd(broker.connection.keys.eval_samples, {"j": "no json"})
    ((_, line),) = broker.eval_samples.take("0-0", "")
    assert len(line["sample"]["completion"]) == COMPLETION
