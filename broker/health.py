"""Health of a service over HTTP, from a thread: /livez, /readyz, /startupz and /metrics, as Kubernetes expects.

No token is needed: they reveal a state, a version and metrics, and none of the run's data.
"""

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from schemas.errors import ConfigError

SILENT_S = 30.0
"""Seconds after which a service whose heartbeat thread makes no progress is stuck."""
NOT_STARTED = ("loading", "starting", "replaying")
NOT_READY = (*NOT_STARTED, "stopping")
TIMEOUT_S = 5.0
Describe = Callable[[], tuple[str, int, dict[str, float]]]


@dataclass
class Pulse:
    """The heartbeat thread's last round and last heartbeat, by which health is judged (monotonic seconds)."""

    ticked: float
    beaten: float = float("-inf")
    started: bool = False


class ProbeServer:
    """HTTP server for probes, which answers until ``close``; ConfigError if the port can't be used."""

    def __init__(self, host: str, port: int, describe: Describe, pulse: Pulse) -> None:
        self._describe = describe
        self._pulse = pulse
        try:
            self._server = ThreadingHTTPServer((host, port), self._handler())
        except OSError as error:
            raise ConfigError(f"probes.port {port} cannot be used on {host}: {error.strerror}") from error
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="probes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving probes."""
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str) -> tuple[int, str]:
        """Return HTTP status and text for a path."""
        state, version, figures = self._describe()
        now = time.monotonic()
        alive = now - self._pulse.ticked < SILENT_S
        self._pulse.started = self._pulse.started or state not in NOT_STARTED
        if path == "/livez":
            return (200, "alive\n") if alive else (503, "stuck\n")
        if path == "/startupz":
            return (200, "started\n") if self._pulse.started else (503, f"{state}\n")
        if path == "/readyz":
            if state in NOT_READY:
                return 503, f"{state}\n"
            heard = now - self._pulse.beaten < SILENT_S
            return (200, f"{state}\n") if heard else (503, "the broker does not answer\n")
        if path == "/metrics":
            return 200, _metrics(state, version, figures)
        return 404, "there are /livez, /readyz, /startupz and /metrics\n"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        probes = self

        class HealthHandler(BaseHTTPRequestHandler):
            timeout = TIMEOUT_S
            server_version = "tidemill"
            sys_version = ""

            def do_GET(self) -> None:
                status, text = probes.answer(self.path.partition("?")[0])
                body = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("X-Content-Type-Options", "nosniff")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing: probes come every few seconds."""

        return HealthHandler


def _metrics(state: str, version: int, figures: dict[str, float]) -> str:
    lines = ["# TYPE tidemill_service_ready gauge", f"tidemill_service_ready {int(state not in NOT_READY)}"]
    if version >= 0:
        lines += ["# TYPE tidemill_service_policy_version gauge", f"tidemill_service_policy_version {version}"]
    for name, value in sorted(figures.items()):
        metric = "tidemill_service_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
        lines += [f"# TYPE {metric} gauge", f"{metric} {value:g}"]
    return "\n".join(lines) + "\n"
