"""The control service: listens, announces its address, and ends in order."""

import contextlib
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import redis
import structlog
import uvicorn
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from broker.client import Broker
from broker.heartbeat import HeartbeatThread
from deploy.control_plane.address import (
    READ_TOKEN,
    TOKEN,
    announce,
    listen,
    make_token,
    page_link,
    read_token,
    withdraw,
)
from deploy.control_plane.alerts.run_watch import RunWatch
from deploy.control_plane.app import LOOPBACK_NAMES, make_app, make_files_app
from deploy.control_plane.routes.context import Context
from deploy.control_plane.status.collector import PlannedRun
from deploy.control_plane.status.kubernetes import Deployments
from deploy.control_plane.status.poller import StatusPoller
from deploy.control_plane.web.security import ProxyUsers
from deploy.control_plane.web.sse import Hub
from schemas.config import ControlConfig, TidemillConfig
from schemas.control_api.orders import scaled_role
from schemas.control_api.status import RunStatus
from schemas.errors import ConfigError, TidemillError
from schemas.messages import Event
from schemas.urls import is_loopback

log = structlog.get_logger()

ANSWER_S = 5.0
"""Most seconds that a request waits for the broker."""


def run_control(config: TidemillConfig, name: str) -> None:
    """Serve until the process is asked to end."""
    token = read_token(config.control.token_file, os.environ)
    reading = reading_token(token)
    if token is None and is_loopback(config.control.host):
        token = make_token(config.folder)
    listener = listen(config.control.host, config.control.port, token)
    port = listener.getsockname()[1]
    if config.control.port not in (0, port):
        log.warning("the port is taken, a free one is used", port=config.control.port)
    broker = Broker.connect(config)
    broker.connection.deadline_s = min(broker.connection.deadline_s, ANSWER_S)
    hub = Hub()

    def tell_alert(text: str, level: Literal["info", "warning", "error"]) -> None:
        """Add an alert to the timeline, if the broker takes it: one of the alerts is that it does not."""
        try:
            broker.events.emit(Event(name="alert", service=name, level=level, text=text))
        except (TidemillError, redis.RedisError) as error:
            log.warning("an alert is not in the timeline", text=text, error=str(error))

    watch = RunWatch(config, tell_alert)
    plan = PlannedRun.of(config)
    poller = StatusPoller(broker, plan, Deployments.here(deployment_names(config)))
    context = Context(plan, name, broker, poller, hub)

    def look(status: RunStatus) -> None:
        # A supervisor watches by itself.
        if not any(service.role == "supervisor" and service.live for service in status.services):
            watch.observe(status)

    poller.on_look = look
    hosts = LOOPBACK_NAMES | {config.control.host.lower()}
    server = _Server(server_settings(make_app(context, token, hosts, reading), config.control), hub)
    url = _url(listener)
    announce(config.folder, url)
    log.info("the control plane listens", url=url)
    try:
        with HeartbeatThread(broker, name, "control", lambda: ("running", -1, {"port": float(port)})):
            server.run(sockets=[listener])
    finally:
        watch.close()
        withdraw(config.folder, url)
        listener.close()


def deployment_names(config: TidemillConfig) -> dict[str, str]:
    """Return the Deployment of each kind of services that can be scaled; of a pool, its name follows that of all."""
    names = config.control.deployments.model_dump()
    own = {scaled_role("generator", pool): f"{names['generator']}-{pool}" for pool in config.pools}
    return {**(own or {"generator": names["generator"]}), "reward": names["reward"]}


def run_files(folder: Path, host: str, port: int, on_listen: Callable[[str], None]) -> None:
    """Serve the page over runs in ``folder`` until asked to end. on_listen: gets the address, with a token if made."""
    token = read_token(None, os.environ)
    reading = reading_token(token)
    own = secrets.token_urlsafe() if token is None and is_loopback(host) else None
    listener = listen(host, port, token or own)
    app = make_files_app(folder, token or own, LOOPBACK_NAMES | {host.lower()}, reading)
    server = _Server(server_settings(app, ControlConfig()), Hub())
    on_listen(page_link(_url(listener), own))
    try:
        server.run(sockets=[listener])
    finally:
        listener.close()


def reading_token(token: str | None) -> str | None:
    """Return the token that only reads; ConfigError if it equals the other token, or there is no other token."""
    reading = read_token(None, os.environ, READ_TOKEN)
    if reading is not None and reading == token:
        raise ConfigError(f"{READ_TOKEN} and {TOKEN} are equal, so every reader could give orders: set different ones")
    if reading is not None and token is None:
        raise ConfigError(f"{READ_TOKEN} needs {TOKEN} as well: set both")
    return reading


def server_settings(app: Any, control: ControlConfig) -> uvicorn.Config:
    """Return how the application is served. Who comes through a trusted proxy is known by the proxy's word."""
    proxies = [str(network) for network in control.trusted_proxies]
    if control.user_header:
        # Around uvicorn's own layer, which replaces the proxy's address by its client's.
        app = ProxyUsers(ProxyHeadersMiddleware(app, proxies), control.user_header, control.trusted_proxies)
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(proxies) and not control.user_header,
        forwarded_allow_ips=proxies,
        timeout_graceful_shutdown=3,
        lifespan="on",
    )


class _Server(uvicorn.Server):
    """HTTP server that ends its open event streams first, which never end alone, and then returns like any service."""

    def __init__(self, config: uvicorn.Config, hub: Hub) -> None:
        super().__init__(config)
        self._hub = hub

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Uvicorn's own would raise the signal again after the end, and what comes after it would not be done.
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self.handle_exit)
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._hub.close()
        super().handle_exit(sig, frame)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
