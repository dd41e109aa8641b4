"""What waits in the streams, also when the server has lost count of what was read."""

from __future__ import annotations

import pytest

from broker.client import Broker
from broker.telemetry.stream_lag import StreamLag, read_stream_lags
from tests.support.broker.prompt_groups import make_task
from tests.support.broker.trainer_sessions import take_over

pytestmark = pytest.mark.integration


def tasks(broker: Broker, surplus: dict[str, int]) -> StreamLag:
    return next(lag for lag in read_stream_lags(broker.connection, surplus) if lag.name == "tasks")


def forget_reads(broker: Broker) -> None:
    """What a restart from the append-only file does to the group's count."""
    keys = broker.connection.keys
    groups = broker.connection.run("groups", lambda client: client.xinfo_groups(keys.tasks))
    for group in groups:
        name, last = group["name"], group["last-delivered-id"]
        broker.connection.run(
            "set", lambda client, n, i: client.xgroup_setid(keys.tasks, n, i, entries_read=0), name, last
        )


def test_what_waits_is_exact_after_the_server_lost_count(broker: Broker) -> None:
    take_over(broker)
    surplus: dict[str, int] = {}
    for number in range(2):
        broker.ledger.admit(make_task(number))
    assert (tasks(broker, surplus).waiting, tasks(broker, surplus).entered) == (2, 2)
    broker.task_queue("g").read(2, 10)
    forget_reads(broker)
    seen = tasks(broker, surplus)
    assert (seen.waiting, seen.pending, seen.entered) == (0, 2, 2)
    broker.ledger.admit(make_task(2))
    seen = tasks(broker, surplus)
    assert (seen.waiting, seen.pending, seen.entered) == (1, 2, 3)
    # Who has not looked before can't know the surplus; there is never more than the stream holds.
    assert tasks(broker, {}).waiting <= seen.length
