"""The chaos suite's network: what services see of each of its faults."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.chaos.proxy import Proxy

TIMEOUT_S = 5.0


class Echo:
    """A server on a unix socket that answers every line with itself, and remembers what it was asked."""

    def __init__(self, path: Path) -> None:
        self.asked: list[bytes] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(1024):
                self.asked.append(data)
                connection.sendall(data)

    def wait_asked(self, data: bytes) -> None:
        """Until it has been asked this."""
        end = time.monotonic() + TIMEOUT_S
        while data not in b"".join(self.asked):
            assert time.monotonic() < end, f"the server was never asked {data!r}"
            time.sleep(0.005)

    def close(self) -> None:
        # A thread that waits in accept wakes up only for this.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[Echo]:
    server = Echo(tmp_path / "s")
    yield server
    server.close()


@pytest.fixture
def proxy(echo: Echo, tmp_path: Path) -> Iterator[Proxy]:
    proxy = Proxy(tmp_path / "s")
    yield proxy
    proxy.close()


def connect(proxy: Proxy, name: str = "a") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", proxy.open(name)), TIMEOUT_S)
    client.settimeout(TIMEOUT_S)
    return client


def ask(client: socket.socket, data: bytes) -> bytes:
    client.sendall(data)
    return client.recv(1024)


def ended(client: socket.socket) -> bool:
    """Whether the connection is over; waits for it."""
    try:
        return client.recv(1024) == b""
    except ConnectionError:
        return True


def test_it_forwards_both_ways(proxy: Proxy) -> None:
    with connect(proxy) as client:
        assert ask(client, b"one") == b"one"
        assert ask(client, b"two") == b"two"


def test_a_reset_is_seen_as_such_and_a_new_connection_works(proxy: Proxy) -> None:
    port = proxy.open("a")
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as client:
        assert ask(client, b"one") == b"one"
        proxy.reset(["a"])
        with pytest.raises(ConnectionResetError):
            client.recv(1024)
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as client:
        assert ask(client, b"two") == b"two"


def test_dropped_replies_belong_to_requests_that_were_done(proxy: Proxy, echo: Echo) -> None:
    with connect(proxy) as client:
        assert ask(client, b"one") == b"one"
        proxy.drop_replies(["a"], cut_after_s=0.2)
        # The fault reaches the proxy's thread before the next accepted connection does.
        connect(proxy, "b").close()
        client.sendall(b"two")
        assert ended(client)
    echo.wait_asked(b"two")


def test_half_open_swallows_requests_too(proxy: Proxy, echo: Echo) -> None:
    with connect(proxy) as client:
        assert ask(client, b"one") == b"one"
        proxy.half_open(["a"], cut_after_s=0.2)
        connect(proxy, "b").close()
        client.sendall(b"two")
        assert ended(client)
    assert b"two" not in b"".join(echo.asked)


def test_a_delay_keeps_the_order_also_when_it_ends(proxy: Proxy, echo: Echo) -> None:
    with connect(proxy) as client:
        assert ask(client, b"one") == b"one"
        proxy.delay(["a"], 0.1)
        client.sendall(b"two")
        echo.wait_asked(b"two")
        client.sendall(b"three")
        proxy.heal(["a"])
        client.sendall(b"four")
        received = b""
        while len(received) < len(b"twothreefour"):
            received += client.recv(1024)
        assert received == b"twothreefour"


def test_only_the_named_service_is_hit(proxy: Proxy) -> None:
    with connect(proxy, "a") as hit, connect(proxy, "b") as other:
        assert ask(hit, b"one") == b"one"
        assert ask(other, b"one") == b"one"
        proxy.reset(["a"])
        assert ended(hit)
        assert ask(other, b"two") == b"two"


def test_without_a_server_connections_end(proxy: Proxy, echo: Echo, tmp_path: Path) -> None:
    (tmp_path / "s").unlink()
    with connect(proxy) as client:
        assert ended(client)
