"""Orders that are asked for twice with the same ``Idempotency-Key`` are done once: the second gets the first's answer.

So a client whose connection broke can ask again. Answers are kept for a day, until this process ends.
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.control_plane.web.problems import problem
from deploy.control_plane.web.security import CHANGES

HEADER = "Idempotency-Key"
LONGEST = 255
KEPT_S = 24 * 3600.0
MOST = 1000
MOST_BYTES = 32 * 2**20
"""Bytes of the answers that are kept; the oldest are forgotten first."""


@dataclass
class _Kept:
    """A request by its digest, and what it was answered; ``messages`` is empty while it is under way."""

    digest: str
    time: float
    messages: list[MutableMapping[str, Any]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes of the answer's body."""
        return sum(len(message.get("body", b"")) for message in self.messages)


class Idempotency:
    """ASGI middleware around an application whose bodies are small."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._kept: OrderedDict[tuple[bytes, str], _Kept] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = dict(scope["headers"]).get(HEADER.lower().encode(), b"") if scope["type"] == "http" else b""
        if not key or scope["method"] not in CHANGES:
            return await self._app(scope, receive, send)
        if len(key) > LONGEST:
            return await problem(422, f"{HEADER} may have {LONGEST} bytes", scope["path"])(scope, receive, send)
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        place = (key, str((scope.get("client") or ("",))[0]))
        request = f"{scope['method']} {scope['path']}?{scope['query_string']!r}".encode() + body
        digest = hashlib.sha256(request).hexdigest()
        self._forget()
        known = self._kept.get(place)
        if known is None:
            await self._ask(scope, body, place, digest, send)
        elif known.digest != digest:
            text = f"this {HEADER} was sent with another request before: take a new one"
            await problem(422, text, scope["path"])(scope, receive, send)
        elif not known.messages:
            text = "the request with this key is still under way: ask again in a moment"
            await problem(409, text, scope["path"], {"Retry-After": "1"})(scope, receive, send)
        else:
            for message in known.messages:
                await send({**message})

    async def _ask(self, scope: Scope, body: bytes, place: tuple[bytes, str], digest: str, send: Send) -> None:
        kept = self._kept[place] = _Kept(digest, time.monotonic())
        answer: list[MutableMapping[str, Any]] = []
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            return unread.pop() if unread else {"type": "http.disconnect"}

        async def keep(message: Message) -> None:
            answer.append({**message})
            await send(message)

        try:
            await self._app(scope, receive, keep)
        finally:
            # A request that failed may be repeated with its key.
            if answer and answer[0].get("status", 503) < 500 and not answer[-1].get("more_body"):
                kept.messages = answer
                self._make_room()
            else:
                del self._kept[place]

    def _make_room(self) -> None:
        total = sum(kept.size for kept in self._kept.values())
        for place in [place for place, kept in self._kept.items() if kept.messages]:
            if total <= MOST_BYTES:
                return
            total -= self._kept.pop(place).size

    def _forget(self) -> None:
        now = time.monotonic()
        while self._kept and (len(self._kept) >= MOST or now - next(iter(self._kept.values())).time > KEPT_S):
            self._kept.popitem(last=False)
