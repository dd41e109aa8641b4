"""A team behind a proxy that logs users in: each order is kept with the user whom the proxy names."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from broker.client import Broker
from broker.connection.embedded import EmbeddedServer
from deploy.client.team import look, make_server, read_places
from tests.support.broker.control_plane import ControlPlane
from tests.support.broker.trainer_sessions import take_over

DEADLINE_S = 20.0
HEADER, TOKEN = "X-Forwarded-Email", "secret of the control plane"
SESSIONS = {"session=1": "ann@example.org", "session=2": "ben@example.org"}
"""Users by the cookie that an OIDC proxy gave them when they logged in."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A server of its own: it holds no runs of other tests, some of them damaged."""
    with EmbeddedServer(tmp_path_factory.mktemp("team_users")) as server:
        yield server


class Proxy(BaseHTTPRequestHandler):
    """An imitated OIDC proxy: it passes on what logged-in users ask, with their name and the control plane's token."""

    upstreams: dict[str, str]
    """URLs by the host name that a browser asks for."""

    def handle_any(self) -> None:
        user, upstream = SESSIONS.get(self.headers.get("Cookie", "")), self.upstreams[self.headers["Host"]]
        if user is None:
            self.answer(401, b"log in")
            return
        # What a browser says about itself is replaced.
        headers = {name: value for name, value in self.headers.items() if name not in (HEADER, "Host", "Authorization")}
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        named = {HEADER: user, "X-Forwarded-For": "203.0.113.7", "Authorization": f"Bearer {TOKEN}"}
        self.answer(*ask(upstream, self.command, self.path, body, **headers, **named))

    do_GET = do_POST = handle_any

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of requests."""


def ask(
    url: str, method: str, path: str, body: bytes = b"", source: str = "127.0.0.1", **headers: str
) -> tuple[int, bytes]:
    """Status and body of an answer. source: the address from which it is asked."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=DEADLINE_S, source_address=(source, 0))
    connection.request(method, path, body, headers)
    with connection.getresponse() as answer:
        return answer.status, answer.read()


@contextmanager
def served(server: ThreadingHTTPServer) -> Iterator[str]:
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(DEADLINE_S)
        server.server_close()


@pytest.mark.skipif("sys.platform != 'linux'", reason="other systems have only one loopback address")
def test_the_proxys_user_is_kept_with_each_order_and_shown_on_the_page(broker: Broker, tmp_path: Path) -> None:
    take_over(broker)
    run = broker.connection.keys.run
    file = tmp_path / "team.yaml"
    (tmp_path / "token").write_text(TOKEN)
    trusted: dict[str, Any] = {"user_header": HEADER, "trusted_proxies": ["127.0.0.1"]}
    with ControlPlane(broker, run, token=TOKEN, **trusted) as api:
        broker_place = {"owner": "all", "broker": broker.connection.url}
        file.write_text(yaml.safe_dump([{"owner": "ann", "control": api.url, "token_file": "token"}, broker_place]))
        with served(make_server(file, 0, HEADER)) as team:
            Proxy.upstreams = {"runs.example": team, "first.example": api.url}
            with served(ThreadingHTTPServer(("127.0.0.1", 0), Proxy)) as proxy:
                first = {"Host": "first.example", "Content-Type": "application/json"}
                assert ask(proxy, "POST", "/v1/pause", b"{}", **first)[0] == 401
                for cookie in SESSIONS:
                    order = "/v1/pause" if cookie == "session=1" else "/v1/resume"
                    claimed = {HEADER: "eve@example.org", "X-Tidemill-By": "eve"}
                    assert ask(proxy, "POST", order, b"{}", **first, Cookie=cookie, **claimed)[0] == 200
                page = ask(proxy, "GET", "/", Host="runs.example", Cookie="session=1")[1].decode()
            # Past the proxy, with its token: the name of a user is not believed.
            direct = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json", HEADER: "eve@example.org"}
            assert ask(api.url, "POST", "/v1/checkpoint", b"{}", "127.0.0.2", **direct)[0] == 200
            assert ask(team, "GET", "/")[0] == 403
        rows = {row["owner"]: row for row in look(read_places(file), tmp_path, DEADLINE_S) if row["run"] == run}
    events = [event.data["by"] for event in [stored.event for stored in broker.events.newest(10)] if "by" in event.data]
    assert events == ["ann@example.org", "ben@example.org", "127.0.0.2"]
    assert "<p>ann@example.org</p>" in page
    assert "resume ordered by ben@example.org" in page
    for owner in ("ann", "all"):
        assert rows[owner]["last_order"]["by"] == "127.0.0.2"
        assert rows[owner]["last_order"]["text"] == "checkpoint ordered by 127.0.0.2"
