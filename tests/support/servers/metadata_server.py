"""The metadata server of a cloud, imitated: it announces the end of a machine when a test says so."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

TOKEN = "AQAEAL1-token"
NAME = "spot_0"
"""Name of the machine, one of a scale set."""


def events(*names: str) -> str:
    """What Azure tells all machines of a scale set when it takes these back."""
    event = {"EventId": "A", "EventType": "Preempt", "ResourceType": "VirtualMachine", "Resources": list(names)}
    return json.dumps({"DocumentIncarnation": 2, "Events": [event]})


class _Handler(BaseHTTPRequestHandler):
    """Answers as AWS (IMDSv2 only), Google Cloud and Azure document it; asked: set with the first question."""

    ended: ClassVar[threading.Event]
    asked: ClassVar[threading.Event]

    def do_PUT(self) -> None:
        known = self.path == "/latest/api/token" and int(self.headers["X-aws-ec2-metadata-token-ttl-seconds"]) > 0
        self._answer(200 if known else 404, TOKEN)

    def do_GET(self) -> None:
        ended, headers = self.ended.is_set(), self.headers
        self.asked.set()
        if self.path == "/latest/meta-data/spot/instance-action":
            if headers["X-aws-ec2-metadata-token"] != TOKEN:
                return self._answer(401, "")
            return self._answer(
                200 if ended else 404, json.dumps({"action": "terminate", "time": "2026-11-25T08:22:00Z"})
            )
        if self.path == "/computeMetadata/v1/instance/preempted" and headers["Metadata-Flavor"] == "Google":
            return self._answer(200, "TRUE" if ended else "FALSE")
        if self.path == "/metadata/scheduledevents?api-version=2020-07-01" and headers["Metadata"] == "true":
            return self._answer(200, events("spot_7", NAME) if ended else events("spot_7"))
        if self.path == "/metadata/instance/compute/name?api-version=2021-02-01&format=text":
            return self._answer(200 if headers["Metadata"] == "true" else 400, NAME)
        return self._answer(400, "")

    def _answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@contextmanager
def metadata_server() -> Iterator[tuple[str, threading.Event, threading.Event]]:
    """Yield its address, an event that is set once it was asked, and one to set when the machine shall end."""
    handler = type("Handler", (_Handler,), {"ended": threading.Event(), "asked": threading.Event()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", handler.asked, handler.ended
        finally:
            server.shutdown()
            thread.join(10)
