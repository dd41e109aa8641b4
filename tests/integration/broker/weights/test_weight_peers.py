"""Weights from peers: complete and undamaged if peers die, lie or hang, with a bound on the trainer's traffic."""

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import structlog

from broker.client import Broker
from broker.weights.local_copy import LocalWeights
from broker.weights.peers import certificate, wire
from broker.weights.peers.node import PeerNode
from broker.weights.peers.registry import LEASE_S, Peer, PeerRegistry
from broker.weights.transports import PeerOrigin, PeerReader
from schemas.config.publish import PeerConfig
from schemas.digests import CHUNK_BYTES
from schemas.errors import ConfigError, InfraError
from schemas.messages import Manifest
from tests.support.broker.trainer_sessions import take_over
from tests.support.models.changing_weights import ChangingWeights

CHUNKS = 12
T = TypeVar("T", PeerOrigin, PeerReader)


class Run:
    """A trainer that has published ``data`` as version 1, and generators, each with a connection of its own."""

    def __init__(self, make_broker: Callable[..., Broker], folder: Path, stack: contextlib.ExitStack) -> None:
        self._make_broker, self.folder, self._stack = make_broker, folder, stack
        self.readers: list[PeerReader] = []
        self.broker = make_broker()
        self.term = take_over(self.broker).leader_term
        self.data = np.random.default_rng(0).bytes(CHUNKS * CHUNK_BYTES - 17)
        (folder / "out").mkdir()
        self.origin = self.start_trainer()
        file = folder / "out" / "part"
        file.write_bytes(self.data)
        self.broker.weight_publication(self.origin, keep=2).publish(
            file, version=1, step=1, leader_term=self.term, tensors=[], probe=None
        )

    @property
    def manifest(self) -> Manifest:
        newest = self.broker.weights.newest()
        assert newest is not None
        return newest

    def start_trainer(self) -> PeerOrigin:
        return self._closing(PeerOrigin(self.broker.connection, self.folder / "out", PeerConfig()))

    def generator(self, name: str) -> tuple[LocalWeights, PeerNode]:
        broker = self._make_broker(self.broker.connection.keys.run)
        node = PeerNode(broker.connection, name, PeerConfig(streams=2))
        self.readers.append(self._closing(PeerReader(broker.connection, node)))
        broker.weights.serve(self.readers[-1])
        return LocalWeights(broker.weights, self.folder / name), node

    def fetch(self, name: str) -> PeerNode:
        """A generator that has fetched the version, and serves it."""
        copy, node = self.generator(name)
        assert copy.fetch(self.manifest).read_bytes() == self.data
        until(lambda: bool(self.names_of(node)), "it is announced")
        return node

    def names_of(self, node: PeerNode) -> list[str]:
        return [
            name for peer in PeerRegistry(self.broker.connection).find()[1] if peer.id == node.id for name in peer.names
        ]

    def announce(self, host: str, port: int, machine: str = "") -> None:
        """Another peer, which says that it has the version."""
        name = self.manifest.state.uri.removeprefix("peer:")
        peer = Peer("other", host, port, machine or socket.gethostname(), False, [name])
        PeerRegistry(self.broker.connection).announce(peer, LEASE_S)

    def _closing(self, peer: T) -> T:
        return self._stack.enter_context(contextlib.closing(peer))


def until(condition: Callable[[], bool], what: str) -> None:
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError(what)


@pytest.fixture
def run(make_broker: Callable[..., Broker], tmp_path: Path) -> Iterator[Run]:
    with contextlib.ExitStack() as stack:
        yield Run(make_broker, tmp_path, stack)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No reader asks the trainer for more because this machine is busy."""
    for name in ("download.PATIENCE_S", "download.SLOW_S", "download.STALL_S", "chunk_store.RIVAL_S"):
        monkeypatch.setattr(f"broker.weights.peers.{name}", 60.0)


def test_eight_generators_at_once_get_it_and_the_trainer_sends_it_twice_at_most(patient: None, run: Run) -> None:
    copies = [run.generator(f"g{index}") for index in range(8)]
    with ThreadPoolExecutor(8) as threads:
        paths = list(threads.map(lambda pair: pair[0].fetch(run.manifest), copies))
    assert all(path.read_bytes() == run.data for path in paths)
    assert run.origin.node.server.sent_bytes <= 2.2 * len(run.data)
    sent = sum(node.server.sent_bytes for _, node in copies)
    assert sent >= 5.8 * len(run.data), "the rest came from one another"


def test_who_comes_later_gets_it_from_other_generators(patient: None, run: Run) -> None:
    run.fetch("g0")
    before = run.origin.node.server.sent_bytes
    run.fetch("g1")
    assert run.origin.node.server.sent_bytes == before


def test_a_generator_has_it_from_another_though_the_trainer_is_gone(run: Run) -> None:
    run.fetch("g0")
    run.origin.close()
    run.fetch("g1")


def test_a_trainer_that_was_started_again_serves_what_was_published_before(run: Run) -> None:
    run.origin.close()
    run.start_trainer()
    run.fetch("g0")


def test_a_peer_that_has_damaged_bytes_costs_time_and_nothing_else(run: Run, tmp_path: Path) -> None:
    run.fetch("g0")
    with (tmp_path / "g0" / "whole").open("r+b") as file:
        for chunk in range(CHUNKS):
            file.seek(chunk * CHUNK_BYTES + 5)
            file.write(b"damage")
    with structlog.testing.capture_logs() as logs:
        run.fetch("g1")
    assert any(log["event"] == "a peer sent a damaged chunk" for log in logs)


def test_a_peer_that_ends_while_others_read_from_it_costs_them_nothing(patient: None, run: Run) -> None:
    first = run.fetch("g0")
    run.origin.close()
    readers = [run.generator(f"g{index}")[0] for index in (1, 2)]
    with ThreadPoolExecutor(2) as threads:
        reading = [threads.submit(reader.fetch, run.manifest) for reader in readers]
        until(lambda: first.server.sent_bytes > 0, "they read from it")
        first.close()
        again = run.start_trainer()
        paths = [found.result(30) for found in reading]
    assert all(path.read_bytes() == run.data for path in paths)
    assert again.node.server.sent_bytes <= 2.2 * len(run.data)


@pytest.mark.parametrize("behaviour", ["silent", "refused"])
def test_a_peer_that_does_not_answer_is_gone_around(run: Run, behaviour: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.weights.peers.wire.SILENCE_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        run.announce(*listener.getsockname()[:2])
        if behaviour == "refused":
            listener.close()
        run.fetch("g0")


def test_a_process_that_never_served_anything_ends_in_order(run: Run) -> None:
    run.generator("g0")
    run.readers[0].close()


def test_a_fetch_is_given_up_when_its_process_ends(run: Run) -> None:
    run.origin.close()
    copy, _ = run.generator("g0")
    with ThreadPoolExecutor(1) as threads:
        fetching = threads.submit(copy.fetch, run.manifest)
        until(lambda: (run.folder / "g0" / "whole.part").exists(), "it has begun")
        run.readers[0].close()
        with pytest.raises(InfraError, match="abandoned, because this process ends"):
            fetching.result(10)
    with pytest.raises(InfraError, match="abandoned, because this process ends"):
        copy.fetch(run.manifest)


def test_only_who_knows_the_runs_key_is_served(run: Run) -> None:
    _, (peer,) = PeerRegistry(run.broker.connection).find()
    with pytest.raises((OSError, InfraError)):
        wire.connect(peer.host, peer.port, b"another key")
    with socket.create_connection((peer.host, peer.port)) as stream:
        stream.settimeout(5)
        wire.receive_exactly(stream, 32)
        stream.sendall(b"\0" * 64)
        assert stream.recv(1) == b"", "nothing is said to it"


def test_a_server_that_does_not_know_the_runs_key_is_not_believed(run: Run) -> None:
    key, _ = PeerRegistry(run.broker.connection).find()
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        asking = threads.submit(wire.connect, *listener.getsockname()[:2], key)
        stream, _ = listener.accept()
        with stream:
            stream.sendall(b"n" * 32)
            wire.receive_exactly(stream, 64)
            stream.sendall(b"p" * 32)
            with pytest.raises(InfraError, match="does not know the run's key"):
                asking.result(5)


def test_the_key_is_the_runs_own(run: Run, make_broker: Callable[..., Broker]) -> None:
    registry = PeerRegistry(run.broker.connection)
    other = PeerRegistry(make_broker().connection)
    peer = Peer("p", "127.0.0.1", 1, "m", False, [])
    assert registry.announce(peer) == registry.find()[0] != other.announce(peer)
    assert len(registry.find()[0]) == 64


def test_a_peer_without_a_lease_is_not_found(run: Run) -> None:
    registry = PeerRegistry(run.broker.connection)
    keys = run.broker.connection.keys
    registry.announce(Peer("dead", "127.0.0.1", 1, "m", False, []))
    record = run.broker.connection.client.hget(keys.peers, "peer:dead")
    assert isinstance(record, bytes)
    run.broker.connection.client.hset(keys.peers, "peer:dead", b"1000 " + record.partition(b" ")[2])
    assert "dead" not in [peer.id for peer in registry.find()[1]]
    registry.announce(Peer("new", "127.0.0.1", 1, "m", False, []))
    assert not run.broker.connection.client.hexists(keys.peers, "peer:dead"), "and forgotten"
    registry.announce(Peer("new", "127.0.0.1", 1, "m", False, []), lease_s=0)
    assert "new" not in [peer.id for peer in registry.find()[1]]


def test_a_loopback_address_of_another_machine_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.weights.peers.download.STALL_S", 0.5)
    run.origin.close()
    run.announce("127.0.0.1", 1, machine="another")
    with pytest.raises(
        InfraError, match=r"other on another has registered the address 127.0.0.1.*set trainer.publish.peer.host"
    ):
        run.generator("g0")[0].fetch(run.manifest)


@pytest.fixture
def secured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As beside a broker with TLS."""
    pytest.importorskip("cryptography")
    monkeypatch.setattr("broker.weights.peers.registry.has_tls", lambda url: True)


def test_beside_a_broker_with_tls_peers_have_it_too(secured: None, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.fetch("g0")
    run.fetch("g1")
    _, peers = PeerRegistry(run.broker.connection).find()
    assert len({peer.fingerprint for peer in peers}) == 3
    plain = next(peer for peer in peers if peer.origin)
    monkeypatch.setattr("broker.weights.peers.wire.SILENCE_S", 0.3)
    with pytest.raises((OSError, InfraError)):
        wire.connect(plain.host, plain.port, b"key")


def test_another_certificate_than_the_brokers_is_refused(secured: None, run: Run) -> None:
    key, (peer,) = PeerRegistry(run.broker.connection).find()
    with pytest.raises(InfraError, match="its certificate is not the one that the broker names"):
        wire.connect(peer.host, peer.port, key, lambda stream: certificate.secure(stream, "0" * 64))


def test_a_peer_that_ends_while_it_serves_under_tls_costs_nothing(secured: None, run: Run) -> None:
    first = run.fetch("g0")
    copy, _ = run.generator("g1")
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(copy.fetch, run.manifest)
        until(lambda: first.server.sent_bytes > 0, "it reads from it")
        first.close()
        assert reading.result(30).read_bytes() == run.data


def test_tls_without_its_package_is_refused_in_a_line(secured: None, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match=r"needs the package cryptography: pip install 'tidemill\[tls\]'"):
        PeerNode(run.broker.connection, "g", PeerConfig())


def test_a_port_that_is_taken_is_named(run: Run) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match=r"peer.port: weights can't be served at 127.0.0.1:.*in use"),
    ):
        PeerNode(run.broker.connection, "g", PeerConfig(port=taken.getsockname()[1]))


def test_a_state_that_was_made_of_deltas_is_passed_on_whole(make_broker: Callable[..., Broker], tmp_path: Path) -> None:
    broker = make_broker()
    trainer = ChangingWeights(broker, tmp_path, "peer", take_over(broker).leader_term)
    reading, late = (make_broker(broker.connection.keys.run) for _ in range(2))
    with contextlib.closing(PeerReader(reading.connection, PeerNode(reading.connection, "g", PeerConfig()))) as reader:
        reading.weights.serve(reader)
        copy = LocalWeights(reading.weights, tmp_path / "in")
        with contextlib.closing(trainer):
            copy.fetch(trainer.publish(1))
            newest = trainer.publish(2)
            assert not newest.whole
            copy.fetch(newest)
        until(lambda: late.weights.has(newest.state), "it is announced")
        assert trainer.is_at(LocalWeights(late.weights, tmp_path / "late").fetch(newest))
