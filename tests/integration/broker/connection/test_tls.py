"""rediss:// with a private CA, to a server with TLS and to one behind a TLS front; mistakes are reported at once."""

import contextlib
import os
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.client import Broker
from broker.connection.connection import Connection, check_server_now
from broker.connection.embedded import START_DEADLINE_S, EmbeddedServer, wait_ready
from broker.connection.keys import Keys
from broker.weights.peers.node import PeerNode
from broker.weights.transports import PeerOrigin, PeerReader
from schemas.config import BrokerConfig
from schemas.config.publish import PeerConfig
from schemas.errors import ConfigError
from schemas.system.guarded_process import GuardedProcess
from tests.support.broker.one_group import fetch_weights, move_one_group, publish_weights
from tests.support.broker.trainer_sessions import take_over
from tests.support.runs.programs import free_port, skip_or_fail


class TlsServer(EmbeddedServer):
    """A server with TLS on ``tls_port``, beside its unix socket."""

    def __init__(self, folder: Path, certificates: Path, clients: str = "no") -> None:
        super().__init__(folder)
        self.tls_port = free_port()
        self._certificates = certificates
        self._clients = clients

    def command(self) -> list[str]:
        files = ("cert-file", "server.crt"), ("key-file", "server.key"), ("ca-cert-file", "ca.crt")
        options = [word for option, name in files for word in (f"--tls-{option}", str(self._certificates / name))]
        return [*super().command(), "--tls-port", str(self.tls_port), "--tls-auth-clients", self._clients, *options]

    def start(self) -> str:
        """As any server; without TLS in it, which ends it at once, there is only the front to test with."""
        self.prepare()
        self.process = GuardedProcess(self.command(), "broker", os.environ, subprocess.DEVNULL, subprocess.DEVNULL)
        end = time.monotonic() + START_DEADLINE_S
        while not self.socket.exists():
            if self.process.poll() is not None:
                skip_or_fail(
                    "the server on this machine was built without TLS, redis-server has it: as root, make system"
                )
            if time.monotonic() > end:
                pytest.fail(f"the server did not start within {START_DEADLINE_S:.0f} s")
            time.sleep(0.02)
        wait_ready(self.url, START_DEADLINE_S)
        return self.url


class TlsFront:
    """Terminates TLS in front of a server's unix socket, a thread for each direction of each connection."""

    def __init__(self, path: Path, certificates: Path) -> None:
        self._path = path
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(certificates / "server.crt", certificates / "server.key")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(plain,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),
            self._context.wrap_socket(plain, server_side=True) as client,
            socket.socket(socket.AF_UNIX) as server,
        ):
            server.connect(str(self._path))
            threading.Thread(target=_copy, args=(server, client), daemon=True).start()
            _copy(client, server)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module", params=["server", "front"])
def port(request: pytest.FixtureRequest, certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Where TLS is spoken, by the server itself or by a front."""
    folder = tmp_path_factory.mktemp("tls")
    if request.param == "server":
        with_tls = TlsServer(folder, certificates)
        with_tls.start()
        yield with_tls.tls_port
        with_tls.stop()
    else:
        server = EmbeddedServer(folder)
        server.start()
        front = TlsFront(server.socket, certificates)
        yield front.port
        front.close()
        server.stop()


def connect(url: str) -> Broker:
    """With a deadline longer than any test, because a rejection must be reported before it."""
    config = BrokerConfig(deadline_s=300.0)
    return Broker(Connection(url, Keys("tidemill", "tls"), config.deadline_s), config)


def test_a_group_passes_every_hop_over_tls(port: int, certificates: Path, tmp_path: Path) -> None:
    url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificates / 'ca.crt'}"
    assert check_server_now(url) == []
    move_one_group({role: connect(url) for role in ("feeder", "generator", "reward", "trainer", "observer")}, tmp_path)


def test_weights_go_from_peer_to_peer_beside_it(port: int, certificates: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificates / 'ca.crt'}"
    training, reading = connect(url), connect(url)
    training.purge()
    leader_term = take_over(training).leader_term
    with (
        contextlib.closing(PeerOrigin(training.connection, tmp_path, PeerConfig())) as origin,
        contextlib.closing(PeerReader(reading.connection, PeerNode(reading.connection, "g", PeerConfig()))) as reader,
    ):
        publish_weights(training, leader_term, 1, tmp_path, transport=origin)
        reading.weights.serve(reader)
        assert fetch_weights(reading, tmp_path).version == 1
        assert all(peer.fingerprint for peer in origin.node.registry.find()[1])


@pytest.mark.parametrize("query", ["?ssl_ca_certs={other}", ""], ids=["another CA", "the system's CAs"])
def test_a_certificate_of_an_unknown_ca_is_refused_at_once(port: int, certificates: Path, query: str) -> None:
    url = f"rediss://:secret@127.0.0.1:{port}/0" + query.format(other=certificates / "other.crt")
    for ask in (lambda: connect(url).ledger.read_state(), lambda: check_server_now(url)):
        with pytest.raises(ConfigError, match=r"certificate is refused \(.*\); give its CA") as refused:
            ask()
        assert "\n" not in str(refused.value)
        assert "secret" not in str(refused.value)


def test_a_certificate_of_another_host_is_refused_at_once(port: int, certificates: Path) -> None:
    url = f"rediss://localhost:{port}/0?ssl_ca_certs={certificates / 'ca.crt'}"
    with pytest.raises(ConfigError, match="certificate is refused"):
        connect(url).ledger.read_state()


def test_a_ca_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ssl_ca_certs=.*none\.crt, which is not a file"):
        connect(f"rediss://127.0.0.1:1/0?ssl_ca_certs={tmp_path / 'none.crt'}")


def test_a_server_that_asks_for_our_certificate_says_so(tmp_path: Path, certificates: Path) -> None:
    server = TlsServer(tmp_path, certificates, clients="yes")
    server.start()
    try:
        url = f"rediss://127.0.0.1:{server.tls_port}/0?ssl_ca_certs={certificates / 'ca.crt'}"
        with pytest.raises(ConfigError, match=r"it refuses our certificate \(.*\); give one"):
            connect(url).ledger.read_state()
        files = f"&ssl_certfile={certificates / 'server.crt'}&ssl_keyfile={certificates / 'server.key'}"
        assert connect(url + files).ledger.read_state().state == "starting"
    finally:
        server.stop()
