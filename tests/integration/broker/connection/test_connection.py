"""Connections to real servers: passing errors are retried, a failover and a cluster's moved slots are followed."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis

from broker.client import Broker
from broker.connection.connection import CONNECTIONS, Connection, open_client
from broker.connection.embedded import EmbeddedServer
from broker.connection.failures import redirect_url
from broker.connection.keys import Keys
from schemas.config import BrokerConfig
from schemas.errors import ConfigError, InfraError
from schemas.messages import Heartbeat, QuestionAnswer
from tests.support.broker.one_group import move_one_group
from tests.support.broker.prompt_groups import make_task
from tests.support.broker.trainer_sessions import take_over
from tests.support.runs.programs import free_port

SLOTS = ((0, 5460), (5461, 10922), (10923, 16383))
ROLES = ("feeder", "generator", "reward", "trainer", "observer")
DEADLINE_S = 30.0


def test_services_that_wait_for_a_broker_come_back_at_different_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, float]] = []

    def draw(least: float, most: float) -> float:
        asked.append((least, most))
        return 0.0

    monkeypatch.setattr("broker.connection.connection.random.uniform", draw)
    connection = Connection(f"redis://127.0.0.1:{free_port()}", Keys("tidemill", "gone"), 0.2)
    with pytest.raises(InfraError):
        connection.run("trying", lambda client: client.ping())
    assert asked[:3] == [(0.025, 0.05), (0.05, 0.1), (0.1, 0.2)]
    assert max(most for _, most in asked) <= 2.0


def test_the_memory_of_a_run_is_measured_without_a_search_of_the_server(broker: Broker) -> None:
    take_over(broker)
    broker.connection.client.config_resetstat()
    assert broker.measure_memory() > 0
    commands: Any = broker.connection.client.info("commandstats")
    assert "cmdstat_scan" not in commands
    found = {key.decode() for key in broker.connection.client.keys(f"{broker.connection.keys.base}:*")}
    assert found <= set(broker.connection.keys.all())


def test_a_script_that_is_flushed_between_loading_and_calling_is_loaded_again(broker: Broker) -> None:
    tries: list[bytes | None] = []

    def operation(client: redis.Redis) -> str:
        tries.append(None)
        if len(tries) == 1:
            client.evalsha("0" * 40, 0)
        return "done"

    assert broker.connection.run("running a script", operation) == "done"
    assert len(tries) == 2


def test_a_server_that_is_busy_with_a_script_is_waited_for(broker: Broker, server: EmbeddedServer) -> None:
    assert broker.heartbeats.list() == [], "the link has found its server"
    other = open_client(server.url)
    limit = other.config_get("lua-time-limit")["lua-time-limit"]
    other.config_set("lua-time-limit", 1)

    def hold() -> None:
        with pytest.raises(redis.ResponseError, match="kill"):
            open_client(server.url).eval("while true do end", 0)

    holder = threading.Thread(target=hold)
    holder.start()
    refusals = 0

    def operation(client: redis.Redis) -> bool:
        nonlocal refusals
        try:
            return bool(client.ping())
        except redis.ResponseError:
            refusals += 1
            if refusals == 2:
                other.script_kill()
            raise

    try:
        end = time.monotonic() + 10
        while not refusals and time.monotonic() < end:
            assert broker.connection.run("looking", operation)
        holder.join(10)
        assert refusals >= 2
        assert not holder.is_alive()
    finally:
        other.config_set("lua-time-limit", limit)


@pytest.mark.parametrize("protocol", [2, 3])
def test_replies_of_both_protocols_are_read(
    broker: Broker, server: EmbeddedServer, tmp_path: Path, protocol: int
) -> None:
    connection = Connection(f"{server.url}?protocol={protocol}", broker.connection.keys, 5.0)
    either = Broker(connection, BrokerConfig())
    move_one_group({role: either for role in (*ROLES, "operator")}, tmp_path)
    assert [stored.event.name for stored in either.events.read_after("0-0", 8)] == ["weights"]
    position, answer = either.questions.position(), QuestionAnswer(id="q", generator="g")
    either.questions.answer(answer)
    assert either.questions.find_answer("q", position)[0] == answer


def test_however_many_threads_ask_at_once_a_process_has_few_connections(broker: Broker) -> None:
    keys, threads = broker.connection.keys, 4 * CONNECTIONS
    barrier = threading.Barrier(threads)

    def ask(number: int) -> int:
        barrier.wait(20)
        broker.connection.run("waiting", lambda client: client.xread({keys.tasks: "0"}, 1, 50))
        return number

    with ThreadPoolExecutor(threads) as executor:
        assert sorted(executor.map(ask, range(threads))) == list(range(threads))
    assert 1 < broker.connection.connections <= CONNECTIONS


def test_connections_are_closed_with_their_client(server: EmbeddedServer) -> None:
    client = open_client(server.url)
    name = str(client.client_id())
    del client
    gc.collect()
    other = open_client(server.url)
    deadline = time.monotonic() + 10
    while any(found["id"] == name for found in other.client_list()):
        assert time.monotonic() < deadline


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
def test_a_service_continues_with_the_new_primary(name: Name, connect: Callable[[], Broker], stale_reads: bool) -> None:
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


def test_who_waits_at_a_demoted_primary_waits_on_at_the_new_one(name: Name, connect: Callable[[], Broker]) -> None:
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


def test_a_server_that_stays_read_only_is_given_up_at_the_deadline(name: Name, connect: Callable[[], Broker]) -> None:
    broker = connect()
    broker.connection.deadline_s = 0.3
    take_over(broker)
    name.demote(0)
    with pytest.raises(InfraError, match="did not answer for"):
        broker.run_control.pause("freeze", "t")
    opened = broker.connection.connections
    assert opened < 10, "it tries with pauses, and opens no connection in between"


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


def connect_to(node: Node, run: str, query: str = "") -> Broker:
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
    move_one_group({role: connect_to(nodes[index % 3], run) for index, role in enumerate(ROLES)}, tmp_path)
    kept = open_client(nodes[home].url).keys(f"{Keys('tidemill', run).base}:*")
    assert len(kept) > 5
    for node in nodes:
        if node is not nodes[home]:
            assert open_client(node.url).keys(f"*{run}*") == []
    assert connect_to(nodes[1], run).purge() == len(kept)


def test_services_follow_a_slot_that_moves_while_they_are_connected(nodes: list[Node]) -> None:
    run = run_on(nodes, 1)
    broker = connect_to(nodes[0], run)
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
