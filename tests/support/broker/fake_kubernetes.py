"""A small Kubernetes API server over TLS: the scale subresource of a few Deployments, with a bearer token."""

import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

NAMESPACE = "tidemill"


class FakeKubernetes:
    """Context manager. replicas: of each Deployment there is; forbidden: those that the service account may not touch.

    asked: every request as (method, path). token: the one that is accepted now.
    """

    def __init__(self, certificate: Path, key: Path, replicas: dict[str, int], forbidden: frozenset[str]) -> None:
        self.replicas = dict(replicas)
        self.forbidden = forbidden
        self.token = "first-token"
        self.asked: list[tuple[str, str]] = []
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def answer(self, method: str, path: str, headers: Any, body: bytes) -> tuple[int, Any]:
        self.asked.append((method, path))
        parts = path.strip("/").split("/")
        if headers["Authorization"] != f"Bearer {self.token}":
            return 401, {"kind": "Status", "reason": "Unauthorized"}
        if parts[:5] != ["apis", "apps", "v1", "namespaces", NAMESPACE] or (parts[5], parts[7:]) != (
            "deployments",
            ["scale"],
        ):
            return 404, {"kind": "Status", "reason": "NotFound"}
        name = parts[6]
        if name in self.forbidden:
            return 403, {"kind": "Status", "reason": "Forbidden"}
        if name not in self.replicas:
            return 404, {"kind": "Status", "reason": "NotFound"}
        if method == "PATCH":
            if headers["Content-Type"] != "application/merge-patch+json":
                return 415, {"kind": "Status", "reason": "UnsupportedMediaType"}
            self.replicas[name] = json.loads(body)["spec"]["replicas"]
        count = self.replicas[name]
        # As Kubernetes writes it: a field that is zero is left out.
        return 200, {"kind": "Scale", "apiVersion": "autoscaling/v1", "spec": {"replicas": count} if count else {}}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def _reply(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, answer = fake.answer(self.command, self.path, self.headers, body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_PATCH = _reply

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

        return Handler
