"""A broker's name may lead to another server after a failover; connections to the old one are given up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from broker.client import Broker
from broker.connection.connection import Connection, open_client
from broker.connection.embedded import EmbeddedServer
from broker.connection.keys import Keys
from schemas.config import BrokerConfig
from schemas.errors import InfraError
from schemas.messages import Heartbeat
from tests.support.broker.prompt_groups import make_task
from tests.support.broker.trainer_sessions import take_over

pytestmark = pytest.mark.integration


class Name:
    """One name for two servers: a link to the socket of the one that new connections reach."""

    def __init__(self, folder: Path) -> None:
        self.servers = [EmbeddedServer(folder / "a"), EmbeddedServer(folder / "b")]
        for server in self.servers:
            server.start()
        self.link = folder / "name.sock"
        self.url = f"unix://{self.link}"
        self.lead_to(0)

    def lead_to(self, index: int) -> None:
        self.link.unlink(missing_ok=True)
        self.link.symlink_to(self.servers[index].socket)

    def demote(self, index: int, *, stale_reads: bool = True) -> None:
        """Make a server a replica, as its supervisor does, of a primary that it has no link to yet."""
        client = open_client(self.servers[index].url)
        client.config_set("replica-serve-stale-data", "yes" if stale_reads else "no")
        client.replicaof("127.0.0.1", "1")


@pytest.fixture
def name(tmp_path: Path) -> Iterator[Name]:
    name = Name(tmp_path)
    yield name
    for server in name.servers:
        server.stop()


@pytest.fixture
def connect(name: Name) -> Callable[[], Broker]:
    def make() -> Broker:
        config = BrokerConfig(deadline_s=5)
        return Broker(Connection(name.url, Keys("tidemill", "failover"), config.deadline_s), config)

    return make


@pytest.mark.parametrize("stale_reads", [True, False], ids=["READONLY", "MASTERDOWN"])
def test_a_service_goes_on_with_the_new_primary_behind_the_same_name(
    name: Name, connect: Callable[[], Broker], stale_reads: bool
) -> None:
    broker = connect()
    broker.heartbeats.send(beat := Heartbeat(service="g", role="generator", host="h", pid=1, state="running"))
    take_over(broker)
    name.lead_to(1)
    name.demote(0, stale_reads=stale_reads)
    take_over(broker)
    assert broker.ledger.admit(make_task(0)).answer == "ok"
    broker.heartbeats.send(beat)
    there = open_client(name.servers[1].url)
    assert there.hlen(broker.connection.keys.services) == 1
    assert there.xlen(broker.connection.keys.tasks) == 1


def test_who_waits_at_a_primary_that_becomes_a_replica_waits_on_at_the_new_one(
    name: Name, connect: Callable[[], Broker]
) -> None:
    broker = connect()
    take_over(broker)
    position = broker.ledger.change_position()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(broker.ledger.wait_change, position, 3000)
        old = open_client(name.servers[0].url)
        while not int(old.info("clients")["blocked_clients"]):
            assert not waiting.done()
        name.lead_to(1)
        name.demote(0)
        waiting.result(timeout=20)
    take_over(broker)
    assert open_client(name.servers[1].url).exists(broker.connection.keys.ctl)


def test_a_server_that_stays_read_only_is_given_up_after_the_deadline(
    name: Name, connect: Callable[[], Broker]
) -> None:
    broker = connect()
    broker.connection.deadline_s = 0.3
    take_over(broker)
    name.demote(0)
    with pytest.raises(InfraError, match="did not answer for"):
        broker.run_control.pause("freeze", "t")
    opened = broker.connection.connections
    assert opened < 10, "it tries with pauses, and opens no connection in between"
