"""The network between services and server: one TCP port for each service, forwarded to the server's unix socket.

Also the one between agents and the endpoint of their generator, a port of this machine.

Runs in a thread of its own. Faults are asked for by name of the service, from any thread; they hit its open
connections (delays also those that come later) and end by themselves or by ``heal``.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

START_DEADLINE_S = 10.0


class Proxy:
    """Life cycle::

    proxy = Proxy(Path("broker.sock"))
    port = proxy.open("generator-0")
    port = proxy.open("agents of generator-0", 41234)  # to another port of this machine
    proxy.drop_replies(["generator-0"], cut_after_s=0.3)
    proxy.close()
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._targets: dict[str, int] = {}
        self.delays: dict[str, float] = {}
        self._connections: dict[str, set[ProxiedConnection]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()

    def open(self, name: str, port: int | None = None) -> int:
        """Listen for a service on a free port of 127.0.0.1, and forward to the target or to ``port``; returns it."""
        self._connections[name] = set()
        if port is not None:
            self._targets[name] = port
        return asyncio.run_coroutine_threadsafe(self._listen(name), self._loop).result(START_DEADLINE_S)

    async def _listen(self, name: str) -> int:
        def accept() -> ProxiedConnection:
            return ProxiedConnection(self, name)

        server = await self._loop.create_server(accept, "127.0.0.1", 0)
        return int(server.sockets[0].getsockname()[1])

    async def connect(self, name: str, protocol: asyncio.Protocol) -> asyncio.Transport:
        """Connect to what a name is forwarded to; OSError if no process listens there."""
        transport: asyncio.Transport
        if name in self._targets:
            transport, _ = await self._loop.create_connection(lambda: protocol, "127.0.0.1", self._targets[name])
        else:
            transport, _ = await self._loop.create_unix_connection(lambda: protocol, str(self._target))
        return transport

    def delay(self, names: Iterable[str], seconds: float) -> None:
        """Delay all bytes by this much, in both directions, until ``heal``."""
        for name in names:
            self.delays[name] = seconds

    def drop_replies(self, names: Iterable[str], cut_after_s: float) -> None:
        """What is asked is still done, but no answer comes any more; then the connections are cut."""
        self._each(names, lambda connection: connection.lose(up=False, cut_after_s=cut_after_s))

    def half_open(self, names: Iterable[str], cut_after_s: float) -> None:
        """Bytes vanish in both directions while the connections look alive; then they are cut."""
        self._each(names, lambda connection: connection.lose(up=True, cut_after_s=cut_after_s))

    def reset(self, names: Iterable[str]) -> None:
        """Reset all connections at once."""
        self._each(names, lambda connection: connection.cut())

    def heal(self, names: Iterable[str]) -> None:
        """End all delays."""
        for name in names:
            self.delays.pop(name, None)

    def close(self) -> None:
        """Cut all connections and end the thread."""
        self.reset(list(self._connections))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_DEADLINE_S)

    def register(self, connection: ProxiedConnection) -> None:
        self._connections[connection.name].add(connection)

    def forget(self, connection: ProxiedConnection) -> None:
        self._connections[connection.name].discard(connection)

    def _each(self, names: Iterable[str], act: Callable[[ProxiedConnection], None]) -> None:
        def run() -> None:
            for name in names:
                for connection in list(self._connections[name]):
                    act(connection)

        self._loop.call_soon_threadsafe(run)


class ProxiedConnection(asyncio.Protocol):
    """One client's connection and the one to the server behind it."""

    def __init__(self, proxy: Proxy, name: str) -> None:
        self.name = name
        self._proxy = proxy
        self._client: asyncio.Transport | None = None
        self._server: asyncio.Transport | None = None
        self._early: list[bytes] = []
        self._lose_up = False
        self._lose_down = False
        self._up = _Pipe(self)
        self._down = _Pipe(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._client = transport  # type: ignore[assignment]
        self._proxy.register(self)
        self._task = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        try:
            transport = await self._proxy.connect(self.name, _ServerSide(self))
        except OSError:
            self.close()
            return
        self._server = transport
        for data in self._early:
            self.upward(data)
        self._early.clear()

    def data_received(self, data: bytes) -> None:
        if self._server is None:
            self._early.append(data)
        else:
            self.upward(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.close()

    def upward(self, data: bytes) -> None:
        if not self._lose_up:
            self._up.send(self._server, data)

    def downward(self, data: bytes) -> None:
        if not self._lose_down:
            self._down.send(self._client, data)

    def lose(self, up: bool, cut_after_s: float) -> None:
        """Answers vanish from now on, requests too if ``up``."""
        self._lose_down, self._lose_up = True, self._lose_up or up
        asyncio.get_running_loop().call_later(cut_after_s, self.cut)

    def cut(self) -> None:
        """Reset the connection."""
        if self._client is not None and not self._client.is_closing():
            end: socket.socket = self._client.get_extra_info("socket")
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._client.abort()
        self.close()

    def close(self) -> None:
        self._proxy.forget(self)
        for transport in (self._client, self._server):
            if transport is not None and not transport.is_closing():
                transport.close()

    @property
    def delay_s(self) -> float:
        return self._proxy.delays.get(self.name, 0.0)


class _ServerSide(asyncio.Protocol):
    """The end towards the server."""

    def __init__(self, connection: ProxiedConnection) -> None:
        self._connection = connection

    def data_received(self, data: bytes) -> None:
        self._connection.downward(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._connection.close()


class _Pipe:
    """One direction: what came first leaves first, also when the delay ends in between."""

    def __init__(self, connection: ProxiedConnection) -> None:
        self._connection = connection
        self._waiting: deque[tuple[float, bytes]] = deque()

    def send(self, transport: asyncio.Transport | None, data: bytes) -> None:
        if transport is None:
            return
        delay = self._connection.delay_s
        if not delay and not self._waiting:
            transport.write(data)
            return
        loop = asyncio.get_running_loop()
        due = max(loop.time() + delay, self._waiting[-1][0] if self._waiting else 0.0)
        self._waiting.append((due, data))
        loop.call_at(due, self._flush, transport)

    def _flush(self, transport: asyncio.Transport) -> None:
        now = asyncio.get_running_loop().time()
        while self._waiting and self._waiting[0][0] <= now + 1e-3:
            _, data = self._waiting.popleft()
            if not transport.is_closing():
                transport.write(data)
