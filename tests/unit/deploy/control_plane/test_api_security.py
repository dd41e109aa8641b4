"""Who may ask the control plane: the layer around the app, driven without a server."""

import asyncio
import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deploy.client.client import connect
from deploy.client.transport import NoControlPlane
from deploy.control_plane.address import address_of, announce, listen, make_token, own_token, read_token
from deploy.control_plane.app import LOOPBACK_NAMES, is_public
from deploy.control_plane.server import server_settings
from deploy.control_plane.web import security
from deploy.control_plane.web.security import Buckets, RequestGuard
from schemas.config import ControlConfig
from schemas.errors import ConfigError
from schemas.urls import is_loopback
from tests.support.configurations import minimal_config

TOKEN = "correct-horse-battery-staple"


async def inner(scope: Any, receive: Any, send: Any) -> None:
    message = await receive()
    status = 200 if message["type"] == "http.request" else 400
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b"inside"})


def ask(guard: RequestGuard, method: str = "GET", path: str = "/v1/status", body: bytes = b"", **headers: str) -> Any:
    """Status, headers and body of one request."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    given = {"host": "localhost:8642", **{name.replace("_", "-"): value for name, value in headers.items()}}
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "client": ("10.0.0.1", 5),
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }
    asyncio.run(guard(scope, receive, send))
    found = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], found, b"".join(message.get("body", b"") for message in sent[1:])


@pytest.fixture
def guarded() -> RequestGuard:
    return RequestGuard(inner, TOKEN, LOOPBACK_NAMES, is_public)


@pytest.fixture
def local() -> RequestGuard:
    return RequestGuard(inner, None, LOOPBACK_NAMES, is_public)


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer é"])
def test_without_the_token_nothing_is_told(guarded: RequestGuard, given: str) -> None:
    for path in ("/v1/status", "/v1/pause", "/metrics", "/openapi.json"):
        status, headers, body = ask(guarded, path=path, authorization=given)
        assert status == 401
        assert headers["www-authenticate"].startswith("Bearer")
        assert headers["content-type"] == "application/problem+json"
        assert b"inside" not in body
        assert TOKEN.encode() not in body


def test_with_the_token_it_answers(guarded: RequestGuard) -> None:
    assert ask(guarded, authorization=f"Bearer {TOKEN}")[0] == 200


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/startupz", "/", "/docs", "/assets/app.js"])
def test_probes_and_the_empty_page_need_no_token(guarded: RequestGuard, path: str) -> None:
    assert ask(guarded, path=path)[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8642", "localhost.evil.example", ""])
def test_a_foreign_name_for_this_machine_is_refused(local: RequestGuard, host: str) -> None:
    assert ask(local, host=host)[0] == 403


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8642", "[::1]:8642", "LOCALHOST:1"])
def test_its_own_names_are_answered(local: RequestGuard, host: str) -> None:
    assert ask(local, host=host)[0] == 200


def test_another_page_can_send_no_order(local: RequestGuard) -> None:
    assert ask(local, "POST", "/v1/pause", origin="http://evil.example")[0] == 403
    assert ask(local, "POST", "/v1/pause", sec_fetch_site="cross-site")[0] == 403
    assert ask(local, "POST", "/v1/pause", origin="http://localhost:8642")[0] == 200


def test_a_body_that_is_too_long_is_refused_whether_it_says_so_or_not(local: RequestGuard) -> None:
    assert ask(local, "POST", content_length=str(security.MAX_BODY_BYTES + 1))[0] == 413
    assert ask(local, "POST", content_length="x")[0] == 413
    assert ask(local, "POST", body=b"x" * (security.MAX_BODY_BYTES + 1))[0] == 400


def test_every_answer_carries_the_headers(guarded: RequestGuard) -> None:
    for headers in (ask(guarded)[1], ask(guarded, authorization=f"Bearer {TOKEN}")[1]):
        assert headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in headers


def test_a_client_that_asks_too_often_is_told_to_wait(local: RequestGuard) -> None:
    local._buckets = Buckets(rate=0.01, burst=5)
    assert [ask(local)[0] for _ in range(5)] == [200] * 5
    refused = ask(local)
    assert refused[0] == 429
    assert int(refused[1]["retry-after"]) >= 1
    assert json.loads(refused[2])["type"] == "urn:tidemill:problem:too-many-requests"
    assert ask(local, path="/livez")[0] == 200


def test_guessing_a_token_ends_soon(guarded: RequestGuard) -> None:
    guarded._buckets = Buckets(rate=0.01, burst=100)
    answers = [ask(guarded, authorization="Bearer guess")[0] for _ in range(10)]
    assert answers[0] == 401
    assert answers[-1] == 429


def test_buckets_fill_again_and_forget_the_oldest_client(monkeypatch: pytest.MonkeyPatch) -> None:
    buckets = Buckets(rate=1.0, burst=2.0)
    assert [buckets.take("a", 0.0) for _ in range(2)] == [0.0, 0.0]
    assert buckets.take("a", 0.0) == 1.0
    assert buckets.take("a", 1.0) == 0.0
    monkeypatch.setattr(security, "MAX_CLIENTS", 2)
    buckets.take("b", 1.0)
    buckets.take("c", 1.0)
    assert buckets.take("a", 1.0) == 0.0


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "example.org"])
def test_beyond_this_machine_it_does_not_listen_without_a_token(host: str) -> None:
    with pytest.raises(ConfigError, match="token is needed"):
        listen(host, 0, None)


def test_on_loopback_a_taken_port_is_replaced() -> None:
    with listen("127.0.0.1", 0, None) as first:
        port = first.getsockname()[1]
        with listen("127.0.0.1", port, None) as second:
            assert second.getsockname()[1] != port
        with pytest.raises(ConfigError, match="cannot listen"):
            listen("256.0.0.1", port, TOKEN)


@pytest.mark.parametrize(("host", "local"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("::", False)])
def test_what_is_loopback(host: str, local: bool) -> None:
    assert is_loopback(host) is local


def test_where_the_token_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert read_token(None, {}) is None
    assert read_token(None, {"TIDEMILL_CONTROL_TOKEN": TOKEN}) == TOKEN
    assert read_token(file, {"TIDEMILL_CONTROL_TOKEN": "other-token-here-1"}) == TOKEN
    assert read_token(None, {"TIDEMILL_CONTROL_TOKEN_FILE": str(file)}) == TOKEN
    with pytest.raises(ConfigError, match="16 or more"):
        read_token(None, {"TIDEMILL_CONTROL_TOKEN": "short"})
    with pytest.raises(ConfigError, match="cannot read"):
        read_token(tmp_path / "none", {})


def test_a_run_has_a_token_of_its_own_that_only_its_owner_reads(tmp_path: Path) -> None:
    token = make_token(tmp_path)
    file = tmp_path / "control_token"
    assert len(token) >= 16
    assert file.stat().st_mode & 0o777 == 0o600
    assert make_token(tmp_path) == own_token(tmp_path) == token, "an open page outlives a restart"
    file.chmod(0o644)
    assert own_token(tmp_path) is None
    assert make_token(tmp_path) != token, "others may have read it"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert own_token(tmp_path) is None


@pytest.fixture
def ended() -> int:
    """The process id of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_the_address_of_a_killed_control_plane_is_gone_and_its_token_is_sent_nowhere(
    tmp_path: Path, ended: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TIDEMILL_CONTROL_URL", raising=False)
    folder, url = tmp_path / "runs" / "mine", "http://127.0.0.1:8642/"
    folder.mkdir(parents=True)
    announce(folder, url)
    token = make_token(folder)
    assert address_of(folder) == url
    assert connect("mine", None)._token == token
    assert connect("mine", "http://elsewhere:8642")._token is None

    known = json.loads((folder / "control.json").read_text())
    (folder / "control.json").write_text(json.dumps(known | {"pid": ended}))
    assert address_of(folder) is None
    (folder / "control.json").write_text(json.dumps(known | {"started": "1"}))
    assert address_of(folder) is None, "a later process has its number"
    with pytest.raises(NoControlPlane):
        connect("mine", None)
    boot = known["place"].partition(":")[0]
    (folder / "control.json").write_text(json.dumps(known | {"pid": ended, "place": f"{boot}:1"}))
    assert address_of(folder) == url, "in another container of this machine, whose processes are unknown here"


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("http://127.0.0.1:8642/", None),
        ("http://[::1]:8642/", None),
        ("http://0.0.0.0:8642/", f"http://{socket.gethostname()}:8642/"),
        ("http://[::]:8642/", f"http://{socket.gethostname()}:8642/"),
        ("http://10.0.0.7:8642/", "http://10.0.0.7:8642/"),
    ],
)
def test_another_machine_is_sent_to_the_control_planes_machine_and_never_to_itself(
    tmp_path: Path, url: str, seen: str | None
) -> None:
    announce(tmp_path, url)
    assert address_of(tmp_path) == url
    known = json.loads((tmp_path / "control.json").read_text())
    (tmp_path / "control.json").write_text(json.dumps(known | {"place": "another-boot:1"}))
    assert address_of(tmp_path) == seen


def client_of(config: ControlConfig, peer: str, forwarded: str) -> str:
    """The client that the application sees of a request from ``peer`` with this X-Forwarded-For."""
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["client"][0])

    served = server_settings(app, config)
    served.load()
    scope = {"type": "http", "client": (peer, 1), "headers": [(b"x-forwarded-for", forwarded.encode())]}
    asyncio.run(served.loaded_app(scope, None, None))
    return seen[0]


def test_a_proxy_is_believed_about_its_clients_only_where_it_is_trusted() -> None:
    trusting = ControlConfig.model_validate({"trusted_proxies": ["10.1.0.0/16", "192.168.0.7"]})
    assert client_of(ControlConfig(), "10.1.2.3", "8.8.8.8") == "10.1.2.3"
    assert client_of(ControlConfig(), "127.0.0.1", "8.8.8.8") == "127.0.0.1"
    assert client_of(trusting, "10.1.2.3", "8.8.8.8") == "8.8.8.8"
    assert client_of(trusting, "10.1.2.3", "1.1.1.1, 8.8.8.8, 192.168.0.7") == "8.8.8.8", (
        "what a client said counts not"
    )
    assert client_of(trusting, "8.8.4.4", "8.8.8.8") == "8.8.4.4"


def user_of(config: ControlConfig, peer: str, **headers: str) -> tuple[str | None, str]:
    """Whom the timeline names for a request from ``peer``, and the client's address."""
    seen: list[tuple[str | None, str]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        named = [value.decode() for name, value in scope["headers"] if name == b"x-tidemill-by"]
        seen.append((named[0] if named else None, scope["client"][0]))

    served = server_settings(app, config)
    served.load()
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(served.loaded_app({"type": "http", "client": (peer, 1), "headers": pairs}, None, None))
    return seen[0]


def test_an_order_is_of_the_user_that_a_trusted_proxy_names_and_nobody_else_can_say() -> None:
    config = ControlConfig.model_validate({"trusted_proxies": ["10.1.0.0/16"], "user_header": "X-Forwarded-Email"})
    said = {"x_forwarded_email": "ada@example.org", "x_forwarded_for": "8.8.8.8", "x_tidemill_by": "eve"}
    assert user_of(config, "10.1.2.3", **said) == ("ada@example.org", "8.8.8.8")
    assert user_of(config, "8.8.4.4", **said) == (None, "8.8.4.4")
    assert user_of(config, "10.1.2.3", x_tidemill_by="eve") == (None, "10.1.2.3")
    assert user_of(ControlConfig(), "8.8.4.4", **said) == ("eve", "8.8.4.4"), "without the setting, anyone says it"


def test_a_header_of_users_needs_a_proxy_to_trust() -> None:
    with pytest.raises(ConfigError, match=r"user_header X-User needs trusted_proxies"):
        minimal_config(model={"path": "m"}, control={"user_header": "X-User"})


def test_a_trusted_proxy_must_be_an_address_or_a_network() -> None:
    with pytest.raises(ConfigError, match=r"control.trusted_proxies.0: 'nginx' is not allowed"):
        minimal_config(model={"path": "m"}, control={"trusted_proxies": ["nginx"]})
