"""Limits on who may ask and how often: a layer around the app that refuses before a request is read or decoded.

- With a token, every request but those for probes and the empty page needs it. It is compared in constant time. A
  second token only reads.
- Without one, the server listens on loopback only and answers only to its own names: a foreign web page can neither
  send an order nor, by a name that points here, read an answer.
- Bodies, addresses and request rates are bounded for each client; there are no CORS headers.
"""

import hmac
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.control_plane.web.problems import problem

Denial = tuple[int, str, dict[str, str]]
"""Status, text and more headers of the answer to a request that is turned down."""

BY_HEADER = "x-tidemill-by"
"""Who asks, for the timeline."""
MAX_BODY_BYTES = 64 * 1024
MAX_TARGET_BYTES = 8 * 1024
RATE, BURST = 50.0, 300.0
"""Requests a second of one client, and how many at once after a rest."""
FAILURE_COST = 15.0
"""A wrong token costs as much as so many requests."""
MAX_CLIENTS = 4096
PROBES = ("/livez", "/readyz", "/startupz")
CHANGES = ("POST", "PATCH", "PUT", "DELETE")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self';"
    " connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
)


_CONVERSATION = re.compile(r"/v1/episodes/[\w-]{32}/v1/.+")


def is_conversation(path: str) -> bool:
    """Return whether a path is in the address of a user's conversation, whose requests are only led elsewhere."""
    return _CONVERSATION.fullmatch(path) is not None


class ProxyUsers:
    """ASGI middleware that passes on in BY_HEADER the user in a trusted proxy's ``header``; no one else is believed."""

    def __init__(self, app: Any, header: str, proxies: Sequence[IPv4Network | IPv6Network]) -> None:
        self._app: ASGIApp = app
        self._header = header.lower().encode()
        self._proxies = list(proxies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            peer = str((scope.get("client") or ("",))[0])
            user = dict(scope["headers"]).get(self._header)
            others = [pair for pair in scope["headers"] if pair[0] not in (self._header, BY_HEADER.encode())]
            trusted = self._is_trusted(peer)
            scope = {**scope, "headers": [*others, (BY_HEADER.encode(), user)] if trusted and user else others}
        await self._app(scope, receive, send)

    def _is_trusted(self, peer: str) -> bool:
        try:
            return any(ip_address(peer) in network for network in self._proxies)
        except ValueError:
            return False


class Buckets:
    """Token buckets by client; the least recently seen client is forgotten first."""

    def __init__(self, rate: float = RATE, burst: float = BURST) -> None:
        self._rate = rate
        self._burst = burst
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, client: str, now: float, cost: float = 1.0) -> float:
        """Return 0 if the request is allowed, else the seconds to wait. A rejected request costs nothing."""
        level, then = self._levels.pop(client, (self._burst, now))
        level = min(self._burst, level + (now - then) * self._rate)
        missing = cost - level
        self._levels[client] = (level if missing > 0 else level - cost, now)
        while len(self._levels) > MAX_CLIENTS:
            self._levels.popitem(last=False)
        return max(0.0, missing / self._rate)

    def charge(self, client: str, cost: float) -> None:
        """Take this from a client, down to nothing."""
        level, then = self._levels.get(client, (self._burst, time.monotonic()))
        self._levels[client] = (max(0.0, level - cost), then)


class RequestGuard:
    """ASGI middleware that admits requests. token: None only on loopback. read_token: allows reading, but no orders.

    hosts: names of the server that requests without a token may use.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str | None,
        hosts: frozenset[str],
        public: Callable[[str], bool],
        read_token: str | None = None,
    ) -> None:
        self._app = app
        self._token = token.encode() if token else None
        self._read_token = read_token.encode() if read_token else None
        self._hosts = hosts
        self._public = public
        self._buckets = Buckets()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope, dict(scope["headers"]))
        answer = _with_headers(send, scope["path"])
        if refusal is not None:
            status, detail, extra = refusal
            await problem(status, detail, scope["path"], extra)(scope, receive, answer)
            return
        await self._app(scope, _limited(receive), answer)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> Denial | None:
        path, method = scope["path"], scope["method"]
        client = str((scope.get("client") or ("unknown",))[0])
        if path not in PROBES:
            wait = self._buckets.take(client, time.monotonic())
            if wait > 0:
                return 429, f"more than {RATE:g} requests a second: wait", {"Retry-After": str(int(wait) + 1)}
        if len(path) + len(scope["query_string"]) > MAX_TARGET_BYTES:
            return 414, f"the address is longer than {MAX_TARGET_BYTES} bytes", {}
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or (int(length) > MAX_BODY_BYTES and not is_conversation(path)):
            return 413, f"a body may have at most {MAX_BODY_BYTES} bytes", {}
        if self._token is not None:
            return None if self._public(path) else self._authenticate(client, headers, method)
        return self._same_site(method, headers)

    def _authenticate(self, client: str, headers: dict[bytes, bytes], method: str) -> Denial | None:
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        bearer = kind.lower() == b"bearer"
        if bearer and hmac.compare_digest(given.strip(), self._token or b""):
            return None
        if bearer and self._read_token and hmac.compare_digest(given.strip(), self._read_token):
            if method not in CHANGES:
                return None
            return 403, "this token may only read: orders need the other one", {}
        if given:
            self._buckets.charge(client, FAILURE_COST)
        extra = {"WWW-Authenticate": 'Bearer realm="tidemill"'}
        return 401, "send the token of this control plane: Authorization: Bearer TOKEN", extra

    def _same_site(self, method: str, headers: dict[bytes, bytes]) -> Denial | None:
        host = headers.get(b"host", b"").decode("latin-1")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if name.strip("[]").lower() not in self._hosts:
            return 403, f"this control plane is not called {name[:100]!r}: ask it as localhost", {}
        if method in CHANGES:
            origin = headers.get(b"origin", b"").decode("latin-1")
            site = headers.get(b"sec-fetch-site", b"same-origin")
            if (origin and origin.partition("://")[2] != host) or site not in (b"same-origin", b"none"):
                return 403, "orders are taken from this control plane's own page only", {}
        return None


def _limited(receive: Receive) -> Receive:
    """Let a body that is longer than allowed (chunked, without length) end early, as if the client had gone."""
    left = MAX_BODY_BYTES

    async def read() -> Message:
        nonlocal left
        message = await receive()
        if message["type"] == "http.request":
            left -= len(message.get("body", b""))
        return message if left >= 0 else {"type": "http.disconnect"}

    return read


def _with_headers(send: Send, path: str) -> Send:
    async def answer(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", []), *HEADERS]
            if not any(name == b"cache-control" for name, _ in headers):
                headers.append((b"cache-control", b"no-store" if path.startswith("/v1") else b"no-cache"))
            message = {**message, "headers": headers}
        await send(message)

    return answer
