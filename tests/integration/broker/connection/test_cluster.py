"""Redis Cluster: a run lies on one node, services find it from any other and follow it when its slot moves."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from broker.client import Broker
from broker.connection.connection import Connection, open_client
from broker.connection.embedded import EmbeddedServer
from broker.connection.failures import redirect_url
from broker.connection.keys import Keys
from schemas.config import BrokerConfig
from schemas.errors import ConfigError
from tests.support.broker.one_group import move_one_group
from tests.support.broker.prompt_groups import make_task
from tests.support.broker.trainer_sessions import take_over

pytestmark = pytest.mark.integration

SLOTS = ((0, 5460), (5461, 10922), (10923, 16383))
ROLES = ("feeder", "generator", "reward", "trainer", "observer")
DEADLINE_S = 30.0


class Node(EmbeddedServer):
    """One node of a cluster."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, port=free_port())
        self.bus = free_port()

    def command(self) -> list[str]:
        return [*super().command(), "--cluster-enabled", "yes", "--cluster-port", str(self.bus)]

    def ask(self, *words: str | bytes | int) -> Any:
        """One command to this node alone."""
        client: Any = open_client(self.url)
        return client.execute_command(*words)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(what: str, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"{what} did not happen within {DEADLINE_S:.0f} s")
        time.sleep(0.05)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    """Three primaries that have all slots between them."""
    nodes = [Node(tmp_path_factory.mktemp(f"node{index}")) for index in range(3)]
    try:
        for node, (first, last) in zip(nodes, SLOTS, strict=True):
            node.start()
            node.ask("CLUSTER", "ADDSLOTSRANGE", first, last)
        for node in nodes[1:]:
            nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", node.port, node.bus)
        until("the cluster's agreement", lambda: all(healthy(node) for node in nodes))
        yield nodes
    finally:
        for node in nodes:
            node.stop()


def healthy(node: Node) -> bool:
    info: Any = node.ask("CLUSTER", "INFO")
    words = info if isinstance(info, dict) else dict(line.split(":") for line in info.decode().split())
    return bool(words["cluster_state"] == "ok" and words["cluster_known_nodes"] == "3")


def connect(node: Node, run: str, query: str = "") -> Broker:
    """A broker whose URL names this node, whichever has the run."""
    config = BrokerConfig(deadline_s=DEADLINE_S)
    return Broker(Connection(node.url + query, Keys("tidemill", run), config.deadline_s), config)


def run_on(nodes: list[Node], index: int) -> str:
    """Name of a run whose keys this node has."""
    first, last = SLOTS[index]
    for number in range(1000):
        slot = nodes[0].ask("CLUSTER", "KEYSLOT", Keys("tidemill", f"run-{number}").ctl)
        if first <= slot <= last:
            return f"run-{number}"
    pytest.fail("no name gives such a slot")


@pytest.mark.parametrize("home", [0, 2])
def test_every_service_finds_the_node_of_its_run_from_any_other(nodes: list[Node], home: int, tmp_path: Path) -> None:
    run = run_on(nodes, home)
    move_one_group({role: connect(nodes[index % 3], run) for index, role in enumerate(ROLES)}, tmp_path)
    kept = open_client(nodes[home].url).keys(f"{Keys('tidemill', run).base}:*")
    assert len(kept) > 5
    for node in nodes:
        if node is not nodes[home]:
            assert open_client(node.url).keys(f"*{run}*") == []
    assert connect(nodes[1], run).purge() == len(kept)


def test_services_follow_a_slot_that_moves_while_they_are_connected(nodes: list[Node]) -> None:
    run = run_on(nodes, 1)
    broker = connect(nodes[0], run)
    take_over(broker)
    for task_id in range(3):
        assert broker.ledger.admit(make_task(task_id)).answer == "ok"
    slot = nodes[0].ask("CLUSTER", "KEYSLOT", broker.connection.keys.ctl)
    source, target = nodes[1], nodes[2]
    to, away = target.ask("CLUSTER", "MYID"), source.ask("CLUSTER", "MYID")
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", away)
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", to)
    keys = open_client(source.url).keys(f"{broker.connection.keys.base}:*")
    source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 10_000, "KEYS", *keys)
    for node in (target, source, nodes[0]):
        node.ask("CLUSTER", "SETSLOT", slot, "NODE", to)
    tasks = broker.task_queue("g").read(10, 10)
    assert [item.message.task_id for item in tasks] == [0, 1, 2]
    assert broker.ledger.admit_all([make_task(3), make_task(4)]).answer == "ok"
    assert broker.ledger.read_state().balanced


def test_a_cluster_has_no_other_databases_and_says_so_at_once(nodes: list[Node]) -> None:
    for node in nodes:
        url = node.url.removesuffix("/0") + "/3"
        connection = Connection(url, Keys("tidemill", "x"), DEADLINE_S)
        with pytest.raises(ConfigError, match=r"SELECT is not allowed in cluster mode|DB index is out of range"):
            connection.run("looking", lambda client: client.ping())


@pytest.mark.parametrize(
    ("url", "moved", "expected"),
    [
        ("redis://a:1/0", "7 b:2", "redis://b:2/0"),
        ("rediss://user:p%40ss@a:1/0?ssl_ca_certs=/ca", "7 b:2", "rediss://user:p%40ss@b:2/0?ssl_ca_certs=/ca"),
        ("redis://:pw@a:1", "7 :2", "redis://:pw@a:2"),
        ("redis://a:1", "7 ::1:2", "redis://[::1]:2"),
        ("unix://user:pw@/run/r.sock", "7 b:2", "redis://user:pw@b:2"),
    ],
)
def test_the_nodes_url_keeps_user_and_options(url: str, moved: str, expected: str) -> None:
    assert redirect_url(url, redis.exceptions.MovedError(moved)) == expected
