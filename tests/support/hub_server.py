"""An imitation of the Hugging Face hub's API: repositories are made, and files come in one commit."""

from __future__ import annotations

import base64
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

TOKEN = "hf_imitated"


@dataclass
class Hub:
    """A hub that listens. repositories: by id, whether it is private. files: content by repository and path."""

    repositories: dict[str, bool] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None: ...

            def do_GET(self) -> None:
                _, _, kind, *rest = self.path.partition("?")[0].split("/")
                if kind == "models":
                    id = "/".join(rest[:2])
                    self._answer({"id": id, "sha": "0" * 40, "siblings": [], "private": hub.repositories.get(id)})
                else:
                    self._answer({"name": "me", "type": "user"})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                if self.headers.get("authorization") != f"Bearer {TOKEN}":
                    return self._answer({"error": "Invalid credentials"}, 401)
                path = self.path.partition("?")[0]
                if path == "/api/repos/create":
                    return self._create(json.loads(body))
                id = "/".join(path.split("/")[3:5])
                if "/preupload/" in path:
                    asked = json.loads(body)["files"]
                    modes = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in asked]
                    return self._answer({"files": modes})
                if "/commit/" in path:
                    return self._commit(id, [json.loads(line) for line in body.splitlines()])
                self._answer({"exists": True})

            def _create(self, wanted: dict[str, Any]) -> None:
                id = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
                if id in hub.repositories:
                    return self._answer({"error": "You already created this model repo", "url": f"{hub.url}/{id}"}, 409)
                hub.repositories[id] = bool(wanted.get("private")) or wanted.get("visibility") == "private"
                self._answer({"url": f"{hub.url}/{id}", "id": id, "name": id})

            def _commit(self, id: str, lines: list[dict[str, Any]]) -> None:
                for line in lines:
                    if line["key"] == "header":
                        hub.messages.append(line["value"]["summary"])
                    elif line["key"] == "file":
                        content = base64.b64decode(line["value"]["content"])
                        hub.files.setdefault(id, {})[line["value"]["path"]] = content
                self._answer({"success": True, "commitOid": "1" * 40, "commitUrl": f"{hub.url}/{id}/commit/{'1' * 40}"})

            def _answer(self, content: Any, status: int = 200) -> None:
                body = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
