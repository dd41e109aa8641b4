"""Where a run's control plane listens: a file in the run's folder, for those on the same machine.

The control service: listens, says where, and ends in order.

It refuses to listen beyond this machine without a token. On loopback a port that is taken is replaced by a free one.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

import structlog
import uvicorn

from broker.api.app import LOOPBACK_NAMES, make_app
from broker.api.routes.context import Context
from broker.api.status.kubernetes import Deployments
from broker.api.status.poller import Watch
from broker.api.web.sse import Hub
from broker.client import Broker
from broker.presence import Presence
from schemas.config import TidemillConfig
from schemas.errors import ConfigError
from schemas.files import atomic_write

ADDRESS = "control.json"

log = structlog.get_logger()


def announce(folder: Path, url: str) -> None:
    """Say it; whoever may not write the folder just leaves no such file."""
    file = folder / ADDRESS
    try:
        atomic_write(file, json.dumps({"url": url, "pid": os.getpid()}))
    except OSError as error:
        log.warning("cannot say where the control plane listens", file=str(file), error=str(error))


def address_of(folder: Path) -> str | None:
    """The URL, with a slash at its end; None when nobody has said one."""
    try:
        found = json.loads((folder / ADDRESS).read_text(encoding="utf-8"))
        return str(found["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def withdraw(folder: Path, url: str) -> None:
    """It listens no more; another one's address stays."""
    if address_of(folder) == url:
        (folder / ADDRESS).unlink(missing_ok=True)


TOKEN = "TIDEMILL_CONTROL_TOKEN"
ANSWER_S = 5.0
"""How long a request waits for the broker."""
GRACE_S = 3
MIN_TOKEN = 16


def run_control(config: TidemillConfig, name: str) -> None:
    """Serve until the process is asked to end."""
    token = read_token(config.control.token_file, os.environ)
    listener = listen(config.control.host, config.control.port, token)
    host, port = listener.getsockname()[:2]
    broker = Broker.connect(config)
    broker.link.deadline_s = min(broker.link.deadline_s, ANSWER_S)
    hub = Hub()
    deployments = Deployments.here(config.control.deployments.model_dump())
    context = Context(config, name, broker, Watch(broker, config, deployments), hub, deployments)
    hosts = LOOPBACK_NAMES | {config.control.host.lower()}
    server = _Server(
        uvicorn.Config(
            make_app(context, token, hosts),
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=GRACE_S,
            lifespan="on",
        ),
        hub,
    )
    url = f"http://{_printable(host)}:{port}/"
    announce(config.folder, url)
    log.info("the control plane listens", url=url, token="required" if token else "not needed on this machine")
    try:
        with Presence(broker, name, "control", lambda: ("running", -1, {"port": float(port)})):
            server.run(sockets=[listener])
    finally:
        withdraw(config.folder, url)
        listener.close()


class _Server(uvicorn.Server):
    """Ends its open event streams first, which would not end by themselves; then returns like any service."""

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


def read_token(file: Path | None, environment: Mapping[str, str]) -> str | None:
    """From ``file``, TIDEMILL_CONTROL_TOKEN_FILE or TIDEMILL_CONTROL_TOKEN; ConfigError if it is too short."""
    source = file or (Path(environment[f"{TOKEN}_FILE"]) if environment.get(f"{TOKEN}_FILE") else None)
    if source is not None:
        try:
            token = source.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"cannot read the control plane's token from {source}: {error.strerror}") from error
    else:
        token = environment.get(TOKEN, "").strip()
    if not token and source is None:
        return None
    if len(token) < MIN_TOKEN or not token.isascii() or any(character.isspace() for character in token):
        raise ConfigError(
            f"the control plane's token must be {MIN_TOKEN} or more ASCII characters without spaces:"
            " make one with `openssl rand -hex 24`"
        )
    return token


def listen(host: str, port: int, token: str | None) -> socket.socket:
    """A listening socket; ConfigError when the address can't be used, or is not safe without a token."""
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"control.host {host} is reachable from other machines, so a token is needed: set {TOKEN},"
            f" {TOKEN}_FILE or control.token_file, or listen on 127.0.0.1"
        )
    try:
        return _bind(host, port)
    except OSError as error:
        if port and is_loopback(host):
            log.warning("the port is taken, a free one is used", port=port)
            return _bind(host, 0)
        raise ConfigError(f"the control plane cannot listen on {host}:{port}: {error.strerror}") from error


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(256)
    except OSError:
        listener.close()
        raise
    return listener


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _printable(host: str) -> str:
    return f"[{host}]" if ":" in host else host
