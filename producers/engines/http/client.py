"""Requests to an inference server, each with a deadline.

A request that could not be sent, or whose answer broke off, is an InfraError: the server's state is unknown then. A
request that the server answers with an error is a ``Refused``, which the caller handles.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from schemas.config import HttpEngineConfig
from schemas.errors import ConfigError, InfraError
from schemas.urls import hide_password

ASK_S = 30.0
"""Deadline of a request that a healthy server answers at once."""
CONNECT_S = 10.0
_IDLE_S = 1.0
"""Unused connections are closed after so long, before the server closes one just as it is used again."""

_NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

Body = dict[str, Any]


class Refused(Exception):
    """The server answered a request with an error. status: of HTTP, or as an event of a stream reports it."""

    def __init__(self, path: str, status: int, text: str) -> None:
        self.status, self.text = status, message(text)
        super().__init__(f"{path} answers {status}: {self.text}")


class ServerClient:
    """Requests to one server; any number may run at the same time."""

    def __init__(self, url: str, key: str | None = None, socket: Path | None = None) -> None:
        """socket: the unix socket that the server listens on, if it is not at the address of ``url``."""
        self.url = url.rstrip("/")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE_S)
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            transport=httpx.AsyncHTTPTransport(limits=limits, uds=None if socket is None else str(socket)),
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            trust_env=False,
        )

    @property
    def shown(self) -> str:
        """The address without a password."""
        return hide_password(self.url)

    async def get(self, path: str, deadline_s: float = ASK_S) -> Any:
        """Return the answer to a GET, decoded if it is JSON."""
        return await self._ask("GET", path, None, deadline_s)

    async def post(self, path: str, body: Body | None = None, deadline_s: float = ASK_S) -> Any:
        """Return the answer to a POST of JSON, decoded if it is JSON."""
        return await self._ask("POST", path, body, deadline_s)

    async def _ask(self, method: str, path: str, body: Body | None, deadline_s: float) -> Any:
        try:
            timeout = httpx.Timeout(deadline_s, connect=min(CONNECT_S, deadline_s))
            response = await self._http.request(method, path, timeout=timeout, **_content(body))
        except httpx.RequestError as error:
            raise self._lost(path, error) from error
        if not response.is_success:
            raise Refused(path, response.status_code, response.text)
        try:
            return msgspec.json.decode(response.content)
        except _NO_JSON:
            return response.text

    @asynccontextmanager
    async def stream(self, path: str, body: Body) -> AsyncIterator[AsyncIterator[Body]]:
        """Yield the decoded events of a POST as they arrive; leaving the block early closes the connection."""
        try:
            async with self._http.stream("POST", path, **_content(body)) as response:
                if not response.is_success:
                    raise Refused(path, response.status_code, (await response.aread()).decode(errors="replace"))
                yield _events(path, response)
        except httpx.RequestError as error:
            raise self._lost(path, error) from error

    def _lost(self, path: str, error: httpx.RequestError) -> InfraError:
        return InfraError(f"the server {self.shown} does not answer {path}: {error or type(error).__name__}")

    async def close(self) -> None:
        await self._http.aclose()


def _content(body: Body | None) -> dict[str, Any]:
    if body is None:
        return {}
    return {"content": msgspec.json.encode(body), "headers": {"Content-Type": "application/json"}}


async def _events(path: str, response: httpx.Response) -> AsyncIterator[Body]:
    async for line in _lines(response):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            event = msgspec.json.decode(data)
        except _NO_JSON as error:
            raise InfraError(f"{path} sends an event that is not JSON: {data[:100]!r}") from error
        if not isinstance(event, dict):
            raise InfraError(f"{path} sends an event that is not an object: {data[:100]!r}")
        if wrong := event.get("error"):
            # An error without a code is one of the request.
            code = wrong.get("code") if isinstance(wrong, dict) else None
            raise Refused(path, code if isinstance(code, int) else 400, data.decode(errors="replace"))
        yield event


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Split lines at newlines only; httpx also splits at Unicode line ends within texts."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest


def message(text: str) -> str:
    """Return the message of an error answer of any form, as one line."""
    try:
        value: Any = msgspec.json.decode(text)
    except _NO_JSON:
        value = text
    for key in ("error", "detail", "message"):
        if isinstance(value, dict) and value.get(key):
            value = value[key]
    return " ".join(str(value).split())[:300] or "nothing"


def read_key(http: HttpEngineConfig) -> str | None:
    """Return the server's key if the configuration names its variable; ConfigError if that is not set."""
    if http.api_key_env is None:
        return None
    key = os.environ.get(http.api_key_env, "").strip()
    if not key:
        raise ConfigError(f"generator.http.api_key_env: the environment variable {http.api_key_env} is not set")
    return key
