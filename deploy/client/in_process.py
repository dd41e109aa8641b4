"""The control plane's application in this process: how a command asks a run's broker if no control plane answers."""

import asyncio
from collections.abc import Mapping, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI

from broker.client import Broker
from deploy.client.transport import Transport
from deploy.control_plane.routes import control, dead_letters, reads, trajectories
from deploy.control_plane.routes.context import Context
from deploy.control_plane.status.collector import PlannedRun
from deploy.control_plane.status.poller import DirectStatus
from deploy.control_plane.web import problems
from deploy.control_plane.web.sse import Hub


def in_process(broker: Broker, plan: PlannedRun) -> Transport:
    """Return a transport that calls the routes on ``broker``, without a socket and without a thread that polls."""
    app = FastAPI(openapi_url=None)
    app.state.context = Context(plan, "command line", broker, DirectStatus(broker, plan), Hub())
    problems.install(app)
    for rooms in (reads, trajectories, control, dead_letters):
        app.include_router(rooms.router)

    def ask(
        method: str, url: str, headers: Mapping[str, str], data: bytes | None, timeout_s: float
    ) -> tuple[int, bytes]:
        return asyncio.run(_call(app, method, url, headers, data or b""))

    return ask


async def _call(app: FastAPI, method: str, url: str, headers: Mapping[str, str], data: bytes) -> tuple[int, bytes]:
    """Call an ASGI application once; return the status and the body of its answer."""
    parts = urlsplit(url)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": parts.scheme,
        "path": parts.path,
        "query_string": parts.query.encode(),
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
    }
    status, body = 0, b""

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status, body
        status = message.get("status", status)
        body += message.get("body", b"")

    await app(scope, receive, send)
    return status, body
