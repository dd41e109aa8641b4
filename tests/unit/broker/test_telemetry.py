"""What people read through the broker: events, figures and samples, in order, bounded, past what nobody can read.

The streams are written by hand here and nothing of it needs a script, so an imitation of the server does.
"""

from __future__ import annotations

import fakeredis
import pytest

from broker.connection.connection import Connection
from broker.connection.keys import Keys
from broker.telemetry.streams import Events, Metrics
from broker.telemetry.trajectories import PAGE, TrajectoryStore
from schemas.codec import encode
from schemas.messages import Event, Score
from tests.support.trajectories import make_trajectory


@pytest.fixture
def connection() -> Connection:
    connection = Connection("redis://127.0.0.1:1", Keys("tidemill", "readers"), 1.0)
    connection.client = fakeredis.FakeRedis()
    return connection


def event(text: str) -> bytes:
    return encode(Event(name="checkpoint", service="trainer", level="info", text=text))


def test_events_come_in_order_without_what_cannot_be_read(connection: Connection) -> None:
    for body in (event("one"), b"\xc1 nonsense", event("two"), event("three")):
        connection.client.xadd(connection.keys.events, {"b": body})
    connection.client.xadd(connection.keys.events, {"other": "field"})
    events = Events(connection)
    assert [found.text for found in events.tail(10)] == ["one", "two", "three"]
    assert [noted.event.text for noted in events.read_after("0-0", 10)] == ["one", "two", "three"]


def test_figures_go_on_where_they_were_read_up_to(connection: Connection) -> None:
    metrics = Metrics(connection)
    for step in range(1, 4):
        connection.client.xadd(connection.keys.metrics, {"j": f'{{"step": {step}}}'})
    position, lines = metrics.read_after("0-0", 2)
    assert [line["step"] for line in lines] == [1, 2]
    position, lines = metrics.read_after(position, 2)
    assert [line["step"] for line in lines] == [3]
    assert metrics.read_after(position, 2) == (position, [])
    assert [line["step"] for line in metrics.tail(2)] == [2, 3]


def test_a_search_goes_over_pages_newest_first_and_says_whether_it_saw_all(connection: Connection) -> None:
    count = 2 * PAGE + 3
    for task in range(count):
        connection.client.xadd(connection.keys.trajectories, {"b": encode(make_trajectory(task))})
    connection.client.xadd(connection.keys.trajectories, {"b": b"nonsense"})
    scored = {"t": "7", "s": "0", "b": encode(Score(reward=0.5))}
    connection.client.xadd(connection.keys.scored, scored)
    samples = TrajectoryStore(connection, 1 << 20)
    every = samples.search(lambda seen: True, limit=count, examine=count + 1)
    assert [seen.trajectory.task_id for seen in every.items] == list(reversed(range(count)))
    (one,) = samples.search(lambda seen: seen.score is not None, limit=2, examine=count + 1).items
    assert (one.trajectory.task_id, one.state, one.score and one.score.reward) == (7, "scored", 0.5)
    few = samples.search(lambda seen: seen.trajectory.task_id == 0, limit=1, examine=PAGE)
    assert (few.items, few.examined, few.complete) == ([], PAGE, False)
