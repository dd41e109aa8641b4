"""A service's heartbeat and the renewal of its leases, from a thread that a busy main loop can't block."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

import redis
import structlog

from broker.client import Broker
from broker.health import ProbeServer, Pulse
from schemas.config import ProbesConfig
from schemas.errors import InfraError, TidemillError
from schemas.messages import Heartbeat

BEAT_S = 1.0

log = structlog.get_logger()


class HeartbeatThread:
    """Thread that sends a heartbeat each second and renews leases every ``renew_s`` seconds: a context manager.

    ``describe`` gives (state, weight version, figures), ``acknowledged`` the numbers of orders that were followed;
    neither may block. probes: where to answer probes over HTTP, if a port is given.
    """

    def __init__(
        self,
        broker: Broker,
        service: str,
        role: str,
        describe: Callable[[], tuple[str, int, dict[str, float]]],
        renew: Callable[[], None] | None = None,
        renew_s: float = 10.0,
        acknowledged: Callable[[], dict[str, int]] = dict,
        probes: ProbesConfig | None = None,
    ) -> None:
        self._broker = broker
        self._service = service
        self._role = role
        self._describe = describe
        self._renew = renew
        self._renew_s = renew_s
        self._acknowledged = acknowledged
        self._probes = probes
        self._server: ProbeServer | None = None
        self._pulse = Pulse(time.monotonic())
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> HeartbeatThread:
        if self._probes is not None and self._probes.port is not None:
            self._server = ProbeServer(self._probes.host, self._probes.port, self._describe, self._pulse)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._wake.set()
        self._thread.join(5)
        if self._server is not None:
            self._server.close()
        try:
            self._broker.heartbeats.remove(self._service)
        except InfraError as error:
            log.warning("could not sign off", error=str(error))

    def soon(self) -> None:
        """Beat at once, because an order was acknowledged."""
        self._wake.set()

    def _run(self) -> None:
        renewed = time.monotonic()
        while True:
            self._pulse.ticked = time.monotonic()
            try:
                # Leases first: work depends on them.
                if self._renew is not None and time.monotonic() - renewed >= self._renew_s:
                    renewed = time.monotonic()
                    self._renew()
                self._beat()
                self._pulse.beaten = time.monotonic()
            except (TidemillError, redis.RedisError) as error:
                # The main loop meets the same broker and decides; this thread only goes on trying.
                log.warning("no sign of life could be sent", error=str(error))
            self._wake.wait(BEAT_S)
            self._wake.clear()
            if self._stop.is_set():
                return

    def _beat(self) -> None:
        state, version, figures = self._describe()
        self._broker.heartbeats.send(
            Heartbeat(
                service=self._service,
                role=self._role,
                host=socket.gethostname(),
                pid=os.getpid(),
                state=state,
                version=version,
                figures=figures,
                acknowledged=dict(self._acknowledged()),
            )
        )
