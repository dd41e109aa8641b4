"""A service's heartbeat and the renewal of its leases, from a thread that a busy main loop can't block.

A live service keeps its name by its heartbeat. The broker assigns work to names, so no two services may share one.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import psutil
import redis
import structlog

from broker.client import Broker
from broker.device_clock import DeviceClock
from broker.flow.owner import Owner
from broker.health import ProbeServer, Pulse
from broker.process_meter import ProcessMeter
from broker.telemetry.heartbeats import COUNTED, SENT
from schemas.codec import try_decode
from schemas.config import ProbesConfig
from schemas.errors import ConfigError, InfraError, TidemillError
from schemas.messages import Heartbeat
from schemas.system.processes import find_place

BEAT_S = 1.0
FRESH_S = 15.0
"""Seconds of silence after which a service has lost its name."""
WATCH_S = 3 * BEAT_S
SIGN_OFF_S = 2.0
"""Seconds that the end of a process waits until the broker has removed its heartbeat."""

log = structlog.get_logger()


def check_name(broker: Broker, service: str) -> bytes:
    """Check that no other live process has this name; InfraError if one does.

    A killed process leaves its heartbeat behind. On this machine its process id tells whether it is alive; on another
    one, a new heartbeat within WATCH_S does. Returns the bytes of the heartbeat left behind, b"" if there is none.
    """
    left = broker.heartbeats.read_bytes(service)
    first = try_decode(left, Heartbeat)
    if first is None or _is_gone(first) or broker.heartbeats.read_clock() - first.time > FRESH_S:
        return left
    end = time.monotonic() + WATCH_S
    while time.monotonic() < end:
        threading.Event().wait(BEAT_S / 10)
        heartbeat = broker.heartbeats.read(service)
        if heartbeat is not None and heartbeat.time > first.time:
            raise _name_taken(service, heartbeat)
    return left


def _name_taken(service: str, heartbeat: Heartbeat | None) -> InfraError:
    who = f"with process id {heartbeat.pid} on {heartbeat.host}" if heartbeat else "of another version of Tidemill"
    return InfraError(
        f"{service} runs already, {who}, and two services of one name would take each other's work: end it, or give"
        f" this one another name: --name {service}-b"
    )


def _is_gone(heartbeat: Heartbeat) -> bool:
    """Return whether the process of a heartbeat is known to have ended, or is this one."""
    if not heartbeat.place or heartbeat.place != find_place():
        return False
    return heartbeat.pid == os.getpid() or not psutil.pid_exists(heartbeat.pid)


def refuse_copy(broker: Broker, owner: Owner, any_host: bool = False) -> None:
    """Raise ConfigError if this run, known by its identity, is alive in another folder: this one is a copy.

    any_host: take the same path on another host for the same folder, which a shared volume is.
    """
    other = broker.owner.read()
    if other is None or other.id != owner.id or other.is_beside(owner):
        return
    if any_host and other.folder == owner.folder:
        return
    if alive := broker.heartbeats.list_heard(FRESH_S, roles=("supervisor", "trainer")):
        raise ConfigError(
            f"the folder {owner.folder} is a copy of a run that is alive in {other.folder} on {other.host}, with"
            f" heartbeats of {', '.join(alive)} in the last {FRESH_S:.0f} s: stop that run first to move it here, or"
            " set another run.name to fork it"
        )


@dataclass(eq=False)
class HeartbeatThread:
    """Thread that sends a heartbeat each second and renews leases every ``renew_s`` seconds: a context manager.

    ``describe`` returns (state, weight version, metrics), ``acknowledged`` the numbers of the orders that were
    followed; neither may block. probes: where to answer probes over HTTP, if a port is given. sole: refuse to start,
    with InfraError, while another live process has the name. pool: of a generator. clock: of the process's devices.
    """

    broker: Broker
    service: str
    role: str
    describe: Callable[[], tuple[str, int, dict[str, float]]]
    renew: Callable[[], object] | None = None
    renew_s: float = 10.0
    acknowledged: Callable[[], dict[str, int]] = dict
    probes: ProbesConfig | None = None
    sole: bool = False
    pool: str = ""
    clock: DeviceClock | None = None

    def __post_init__(self) -> None:
        self._counted: dict[str, int] = {}
        self._uncounted = False
        self._place = find_place()
        # A supervisor's children are services, which report their own metrics.
        self._meter = ProcessMeter(alone=self.role in ("supervisor", "node"))
        self._server: ProbeServer | None = None
        self._pulse = Pulse(time.monotonic())
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        if self.sole:
            self._take_name()
        if self.probes is not None and self.probes.port is not None:
            self._server = ProbeServer(self.probes.host, self.probes.port, self.describe, self._pulse)
        self._meter.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._meter.stop()
        self._stop.set()
        self._wake.set()
        self._thread.join(SIGN_OFF_S)
        if self._thread.is_alive():
            log.warning("could not sign off", error=f"the broker did not answer for {SIGN_OFF_S:.0f} s")
        if self._server is not None:
            self._server.close()

    def _take_name(self) -> None:
        """Take the name with the first heartbeat; the broker refuses it if another process was faster.

        So one of several processes that start at the same moment gets the name, however long another one stalls.
        """
        left = check_name(self.broker, self.service)
        heartbeat = self._make_heartbeat()
        answer = self.broker.heartbeats.claim(heartbeat, left)
        if answer not in SENT:
            raise _name_taken(self.service, try_decode(answer, Heartbeat))
        self._note(heartbeat, answer)

    def soon(self) -> None:
        """Send a heartbeat at once, because an order was acknowledged."""
        self._wake.set()

    def _run(self) -> None:
        renewed = time.monotonic()
        while True:
            self._pulse.ticked = time.monotonic()
            try:
                # Leases first: work depends on them.
                if self.renew is not None and time.monotonic() - renewed >= self.renew_s:
                    renewed = time.monotonic()
                    self.renew()
                self._beat()
                self._pulse.beaten = time.monotonic()
            except (TidemillError, redis.RedisError) as error:
                # The main loop finds the same failure and decides; this thread only retries.
                log.warning("no heartbeat could be sent", error=str(error))
            self._wake.wait(BEAT_S)
            self._wake.clear()
            if self._stop.is_set():
                break
        self._sign_off()

    def _sign_off(self) -> None:
        try:
            if self.clock is not None:
                self._beat()
            self.broker.heartbeats.remove(self.service)
        except (TidemillError, redis.RedisError) as error:
            log.warning("could not sign off", error=str(error))

    def _beat(self) -> None:
        heartbeat = self._make_heartbeat()
        self._note(heartbeat, self.broker.heartbeats.send(heartbeat))

    def _note(self, heartbeat: Heartbeat, answer: bytes) -> None:
        self._uncounted = answer != COUNTED
        if not self._uncounted:
            self._counted = heartbeat.device_ms

    def _make_heartbeat(self) -> Heartbeat:
        state, version, figures = self.describe()
        return Heartbeat(
            service=self.service,
            role=self.role,
            host=socket.gethostname(),
            pid=os.getpid(),
            state=state,
            version=version,
            figures={**figures, **self._meter.figures},
            acknowledged=dict(self.acknowledged()),
            place=self._place,
            pool=self.pool,
            devices=self.clock.devices if self.clock is not None else 0,
            device_ms=self.clock.read_ms() if self.clock is not None else {},
            counted_ms=self._counted,
            uncounted=self._uncounted,
            software=self._meter.software,
        )
