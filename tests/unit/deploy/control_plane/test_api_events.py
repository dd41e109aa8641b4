"""Pages that follow events are forgotten when they go, however they go."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from deploy.control_plane.app import make_app
from deploy.control_plane.routes.context import Context
from deploy.control_plane.status.collector import PlannedRun
from deploy.control_plane.status.poller import StatusPoller
from deploy.control_plane.web.sse import MAX_PAGES, Hub
from schemas.config import parse_config


@pytest.fixture
def app() -> Any:
    config = parse_config(
        {"model": {"path": "m"}, "train": {"name": "arithmetic"}, "reward": {"terms": [{"name": "exact"}]}}
    )
    hub = Hub()
    hub.close()  # A stream ends as soon as it has sent what there is.
    poller = StatusPoller(None, PlannedRun.of(config))  # type: ignore[arg-type]
    return make_app(Context(PlannedRun.of(config), "control", None, poller, hub))  # type: ignore[arg-type]


async def follow(app: Any, spec_version: str, rude: bool) -> int:
    """Ask for the events, as a client that is gone before the first byte if ``rude``; return the status."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": spec_version},
        "method": "GET",
        "path": "/v1/events",
        "raw_path": b"/v1/events",
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
        "client": ("127.0.0.1", 1),
    }
    status = 0

    async def receive() -> MutableMapping[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)
        if rude:
            raise OSError("the client has gone")

    try:
        await app(scope, receive, send)
    except (OSError, ClientDisconnect):
        assert rude
    return status


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
async def test_clients_that_leave_before_the_first_byte_lock_nobody_out(app: Any, spec_version: str) -> None:
    async def leave() -> int:
        for _ in range(MAX_PAGES + 1):
            await follow(app, spec_version, rude=True)
        return await follow(app, spec_version, rude=False)

    assert await leave() == 200
