"""The timeline has a bound in bytes, however long the reasons of a run's errors are."""

from broker.client import Broker
from broker.connection.stream_pages import KEEP_LINES
from broker.telemetry.events import MOST_TEXT
from schemas.messages import Event

BOUND = 40 << 20
"""Of the formula in docs/reliability.md, which has as much for the lines of metrics."""


def test_a_week_of_errors_that_quote_whole_files_stays_within_the_bound(broker: Broker) -> None:
    event = Event(name="sample_failed", service="generator-0", level="error", text="é" * 100_000)
    for _ in range(KEEP_LINES + 300):
        broker.events.emit(event)
    (newest,) = [stored.event for stored in broker.events.newest(1)]
    assert newest.text == "é" * MOST_TEXT + " …"
    memory = broker.connection.client.memory_usage(broker.connection.keys.events, samples=0)
    assert BOUND / 4 < memory < 1.25 * BOUND
