"""What the supervisor does to a service is in the run's timeline, also when the broker comes late."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from broker.client import Broker
from deploy.supervisor.events import KEPT, Notices
from deploy.supervisor.supervisor import Change
from deploy.terminal.snapshot import collect
from schemas.config import parse_config
from schemas.errors import InfraError
from schemas.messages import Event

pytestmark = pytest.mark.integration
DEADLINE_S = 20.0


def texts(broker: Broker) -> list[str]:
    return [f"{event.service}: {event.text}" for event in broker.events.tail(1000)]


def wait(what: str, reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.02)


def test_notices_from_before_the_broker_come_first_and_none_is_lost_at_the_end(broker: Broker) -> None:
    notices = Notices()
    notices.put(Change("broker", "started"))
    with notices.to(broker):
        notices.put(Change("generator-0", "killed by SIGKILL; restart 1 in 0.5 s", "warning"))
    assert texts(broker) == ["broker: started", "generator-0: killed by SIGKILL; restart 1 in 0.5 s"]
    newest = broker.events.newest(1)[0].event
    assert (newest.name, newest.level, newest.data) == ("service", "warning", {"by": "supervisor"})


def test_a_broker_that_takes_nothing_gets_them_later_and_the_oldest_go_first(broker: Broker) -> None:
    emit, refused = broker.events.emit, [True]

    def sometimes(event: Event) -> None:
        if refused[0]:
            raise InfraError("not now")
        emit(event)

    broker.events.emit = sometimes  # type: ignore[method-assign]
    notices = Notices()
    for number in range(KEPT + 50):
        notices.put(Change("s", str(number)))
    with notices.to(broker):
        notices.put(Change("s", "last"))
        refused[0] = False
        wait("the last notice", lambda: texts(broker)[-1:] == ["s: last"])
    assert len(texts(broker)) <= KEPT + 1


def test_the_live_view_does_not_say_twice_what_the_supervisor_did(broker: Broker) -> None:
    config = parse_config(
        {
            "run": {"name": "notices"},
            "model": {"path": "nowhere"},
            "train": {"name": "arithmetic"},
            "reward": {"terms": [{"name": "exact"}]},
        }
    )
    broker.events.emit(Event(name="checkpoint", service="trainer", text="written"))
    with Notices().to(broker) as notices:
        notices.put(Change("trainer", "started"))
    shown = collect(broker, config).notices
    assert [(notice.service, notice.text) for notice in shown] == [("trainer", "written")]
    assert shown[0].time > 0
