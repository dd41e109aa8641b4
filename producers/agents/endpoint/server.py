"""The endpoint's HTTP server, in the event loop of the generator."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from producers.agents.endpoint.app import Endpoint
from producers.agents.endpoint.delivery import KEEP_ALIVE_S
from producers.agents.endpoint.retries import PATIENCE_S
from producers.agents.protocol import OpenSessions
from schemas.config.agents import AgentsConfig
from schemas.errors import ConfigError, InfraError
from schemas.urls import open_listener

IDLE_S = 3600
"""How long a connection is kept while an agent does other work, so that it never uses one that is being closed."""
START_S = 10.0


class EndpointServer:
    """Serves agents from ``start`` to ``close``, which breaks off waiting requests and takes less than a second."""

    def __init__(
        self,
        sessions: OpenSessions,
        settings: AgentsConfig,
        keep_alive_s: float = KEEP_ALIVE_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._settings = settings
        self._endpoint = Endpoint(sessions, settings, keep_alive_s, patience_s)
        self._server: _UvicornServer | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Listen; return the URL without a path, http://127.0.0.1:41234. ConfigError if the address can't be used."""
        listener = listen(self._settings.address)
        self._server = _UvicornServer(
            uvicorn.Config(
                self._endpoint.app(),
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                lifespan="off",
                ws="none",
                timeout_keep_alive=IDLE_S,
                timeout_graceful_shutdown=1,
            )
        )
        host, port = listener.getsockname()[:2]
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="agents' endpoint")
        ready = asyncio.create_task(self._server.ready.wait())
        await asyncio.wait({self._serving, ready}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if not self._server.ready.is_set():
            raise InfraError(f"the agents' endpoint at {host}:{port} has not started within {START_S:g} s")
        if self._settings.public_url:
            return self._settings.public_url.rstrip("/")
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def close(self) -> None:
        """Stop serving; open connections are cut."""
        if self._server is None or self._serving is None:
            return
        self._endpoint.close()
        self._server.should_exit = True
        for connection in list(self._server.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await self._serving


class _UvicornServer(uvicorn.Server):
    """A server that leaves signals to the process, and reports when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


def listen(address: str) -> socket.socket:
    """Return a socket bound to HOST:PORT; ConfigError if the address can't be used."""
    host, _, port = address.rpartition(":")
    try:
        if not host:
            raise ValueError("the host is missing")
        return open_listener(host.strip("[]"), int(port))
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"generator.agents.address {address!r}: must be HOST:PORT of this machine: {error}"
        ) from error
