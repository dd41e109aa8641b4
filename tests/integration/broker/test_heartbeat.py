"""Signs of life never stand in the way of leases."""

from __future__ import annotations

import threading

import pytest

from broker.client import Broker
from broker.heartbeat import HeartbeatThread

pytestmark = pytest.mark.integration


def test_leases_are_renewed_while_no_sign_of_life_can_be_sent(broker: Broker) -> None:
    broker.connection.client.set(broker.connection.keys.services, "hello")
    renewed = threading.Semaphore(0)
    with HeartbeatThread(broker, "g", "generator", lambda: ("running", 0, {}), renewed.release, renew_s=0.01):
        for _ in range(2):
            assert renewed.acquire(timeout=10)
        broker.connection.client.delete(broker.connection.keys.services)
        for _ in range(10):
            assert renewed.acquire(timeout=10)
            if broker.heartbeats.list():
                break
        assert [beat.service for beat in broker.heartbeats.list()] == ["g"]
    assert broker.heartbeats.list() == []


def test_a_service_ends_though_it_cannot_sign_off(broker: Broker) -> None:
    broker.connection.client.set(broker.connection.keys.services, "hello")
    ended = threading.Event()

    def live() -> None:
        with HeartbeatThread(broker, "g", "generator", lambda: ("running", 0, {})):
            pass
        ended.set()

    thread = threading.Thread(target=live, daemon=True)
    thread.start()
    assert ended.wait(20), "it waits for a key that only a trainer mends"
