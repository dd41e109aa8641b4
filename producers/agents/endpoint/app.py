"""The endpoint's application: its routes, their protocols, and the session that a request belongs to.

An agent has a base URL, ``/s/TOKEN/v1``, or the same token as its API key at ``/v1``, because some clients take only
one of the two. ``/s/TOKEN/NAME/v1`` names a sub-agent.
"""

import asyncio
import contextlib
import hashlib
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from producers.agents.endpoint import control
from producers.agents.endpoint.anthropic import count_tokens, read_messages
from producers.agents.endpoint.chat import read_chat
from producers.agents.endpoint.completions import read_completion
from producers.agents.endpoint.delivery import StreamingReply
from producers.agents.endpoint.errors import anthropic_error, as_session_error, openai_error, responses_error
from producers.agents.endpoint.protocols import (
    JSON,
    Asker,
    ModelRequest,
    WireProtocol,
    named_events,
    read_json,
    write_json,
)
from producers.agents.endpoint.responses import read_response
from producers.agents.endpoint.retries import Generations
from producers.agents.protocol import OpenSession, OpenSessions, SessionError
from schemas.config.agents import AgentsConfig
from schemas.errors import TidemillError

MAX_BODY = 64 * 2**20
"""Bytes of a request. A whole sample has to fit into broker.max_message_bytes, 16 MiB by default."""
MAX_READING = 4 * MAX_BODY
"""Bytes of all requests that are being read."""
BODY_S = 120.0
"""How long a client may take to send a request."""
SMALL_BODY = 2**18
"""Bytes up to which a request is decoded in the event loop."""
PREFIXES = ("", "/s/{token}", "/s/{token}/{name}")


CHAT = WireProtocol(read_chat)
MESSAGES = WireProtocol(read_messages, anthropic_error, lambda error: named_events([anthropic_error(error)]))
PROTOCOLS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": WireProtocol(read_completion),
    "/v1/responses": WireProtocol(read_response, error_event=lambda error: named_events([responses_error(error)])),
    "/v1/messages": MESSAGES,
}


class Endpoint:
    """The handlers of all routes. keep_alive_s, patience_s: see delivery.py and retries.py."""

    def __init__(self, sessions: OpenSessions, settings: AgentsConfig, keep_alive_s: float, patience_s: float) -> None:
        self._sessions = sessions
        self._settings = settings
        self._keep_alive_s = keep_alive_s
        self._patience_s = patience_s
        self._reading = 0
        self._generations: weakref.WeakKeyDictionary[OpenSession, Generations] = weakref.WeakKeyDictionary()

    def app(self) -> Starlette:
        """Return the ASGI application with the routes of all protocols."""
        routes = []
        for prefix in PREFIXES:
            for path, protocol in PROTOCOLS.items():
                routes.append(Route(prefix + path, self._asking(protocol), methods=["POST"]))
            counting = self._answering(count_tokens, MESSAGES, MAX_BODY)
            routes.append(Route(prefix + "/v1/messages/count_tokens", counting, methods=["POST"]))
            routes.append(Route(prefix + "/v1/models", self._answering(control.models), methods=["GET"]))
            routes.append(Route(prefix + "/v1/models/{model:path}", self._answering(control.model), methods=["GET"]))
        for prefix in PREFIXES[:2]:
            routes.append(Route(prefix + "/tidemill/v1/reward", self._answering(control.reward), methods=["POST"]))
            routes.append(Route(prefix + "/tidemill/v1/end", self._answering(control.end), methods=["POST"]))
        return Starlette(routes=routes, exception_handlers={HTTPException: _http_error, Exception: _bug})

    def close(self) -> None:
        """Cancel all model calls under way."""
        for generations in list(self._generations.values()):
            generations.close()

    def _asking(self, protocol: WireProtocol) -> Callable[[Request], Awaitable[ASGIApp]]:
        """Return the handler of a route that makes model calls."""

        async def handle(request: Request) -> Response | StreamingReply:
            asker, generations = self._asker(request)

            def read(body: bytes) -> tuple[bytes, ModelRequest]:
                digest = hashlib.blake2b(request.scope["path"].encode() + b"\0" + body, digest_size=16).digest()
                return digest, protocol.read(read_json(body), asker)

            async with self._body(request, MAX_BODY) as body:
                if len(body) <= SMALL_BODY:
                    digest, model_request = read(body)
                else:
                    digest, model_request = await asyncio.to_thread(read, body)
            retry = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
            generation = generations.ask(digest, retry, lambda: asker.session.complete(model_request.call))
            return StreamingReply(model_request, generation, generations, protocol, self._keep_alive_s)

        return _guarded(handle, protocol)

    def _answering(
        self, answer: Callable[[bytes, Asker], Awaitable[JSON]], protocol: WireProtocol = CHAT, most: int = SMALL_BODY
    ) -> Callable[[Request], Awaitable[ASGIApp]]:
        """Return the handler of a route that answers at once. most: bytes of its requests."""

        async def handle(request: Request) -> Response:
            asker, _ = self._asker(request)
            async with self._body(request, most) as body:
                reply = await answer(body, asker)
            return _json(200, reply)

        return _guarded(handle, protocol)

    @contextlib.asynccontextmanager
    async def _body(self, request: Request, most: int) -> AsyncIterator[bytes]:
        """Hold the whole body. SessionError if it is too long, too slow, or too much is being read already."""
        chunks, size = [], 0
        try:
            try:
                async with asyncio.timeout(BODY_S):
                    async for chunk in request.stream():
                        size += len(chunk)
                        self._reading += len(chunk)
                        if size > most:
                            raise SessionError(413, "body_too_long", f"the body has more than {most} bytes")
                        if self._reading > MAX_READING:
                            raise SessionError(503, "overloaded", f"{MAX_READING} bytes of requests are read, retry")
                        chunks.append(chunk)
            except TimeoutError as error:
                raise SessionError(408, "body_too_slow", f"the body was not sent within {BODY_S:g} s") from error
            yield b"".join(chunks)
        finally:
            self._reading -= size

    def _asker(self, request: Request) -> tuple[Asker, Generations]:
        """Return the sender of a request and its session's model calls; SessionError if there is no such session."""
        token = request.path_params.get("token")
        if token is None:
            kind, _, key = request.headers.get("authorization", "").partition(" ")
            token = key.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
        session = self._sessions.find(token)
        generations = self._generations.get(session)
        if generations is None:
            generations = self._generations[session] = Generations(session, self._patience_s)
            session.watch(generations.unreceived)
        name = request.path_params.get("name", "main")
        return Asker(session, name, self._settings, generations.responses), generations


def _guarded(
    handle: Callable[[Request], Awaitable[ASGIApp]], protocol: WireProtocol
) -> Callable[[Request], Awaitable[ASGIApp]]:
    async def guarded(request: Request) -> ASGIApp:
        try:
            return await handle(request)
        except (SessionError, TidemillError) as error:
            session_error = as_session_error(error)
            return _json(session_error.status, protocol.error(session_error))
        except ClientDisconnect:
            return Response(status_code=400)

    return guarded


def _json(status: int, body: JSON) -> Response:
    return Response(write_json(body), status, media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = f"{request.method} {request.url.path}: {getattr(error, 'detail', error)}"
    return _json(status, openai_error(SessionError(status, "unknown_route", message)))


async def _bug(request: Request, error: Exception) -> Response:
    return _json(500, openai_error(SessionError(500, "internal_error", "the endpoint failed, its log says why")))
