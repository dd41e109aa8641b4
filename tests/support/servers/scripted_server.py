"""An HTTP server that answers JSON as a test has written it, and keeps what it was asked."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any] | None
"""A status and a body; None cuts the connection."""


@dataclass(frozen=True)
class Request:
    body: Any
    headers: Any
    path: str
    client: tuple[str, int]


@dataclass
class ScriptedServer:
    url: str
    asked: list[Request] = field(default_factory=list)

    @property
    def requests(self) -> list[Any]:
        """The bodies of what it was asked."""
        return [request.body for request in self.asked]


@contextmanager
def serving(*answers: Answer | Callable[[Request], Answer]) -> Iterator[ScriptedServer]:
    """A server that gives these answers to POST in turn, and the last one again and again."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            request = Request(body, self.headers, self.path, self.client_address)
            chosen = answers[min(len(server.asked), len(answers) - 1)]
            server.asked.append(request)
            answer = chosen(request) if callable(chosen) else chosen
            if answer is None:
                self.close_connection = True
                return
            content = json.dumps(answer[1]).encode()
            self.send_response(answer[0])
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        listening.daemon_threads = True
        server = ScriptedServer(f"http://127.0.0.1:{listening.server_port}")
        thread = threading.Thread(target=listening.serve_forever, args=[0.02])
        thread.start()
        try:
            yield server
        finally:
            listening.shutdown()
            thread.join(10)
