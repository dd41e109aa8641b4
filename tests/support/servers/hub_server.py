"""An imitation of the Hugging Face hub's API: repositories are made, and files come in one commit; or are fetched."""

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

TOKEN = "hf_imitated"


@dataclass
class Hub:
    """A hub that listens. repositories: by id, whether it is private. files: content by repository and path.

    revisions: what is to be fetched, by id and revision: the commit, and content by path. fetched: paths, by commit.
    """

    repositories: dict[str, bool] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    revisions: dict[tuple[str, str], tuple[str, dict[str, bytes]]] = field(default_factory=dict)
    fetched: dict[str, list[str]] = field(default_factory=dict)

    def __enter__(self) -> Self:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None: ...

            def do_GET(self) -> None:
                _, _, kind, *rest = self.path.partition("?")[0].split("/")
                if rest[:1] == ["resolve"] or rest[2:3] in (["revision"], ["tree"]):
                    self._send()
                elif kind == "models":
                    id = "/".join(rest[:2])
                    self._answer({"id": id, "sha": "0" * 40, "siblings": [], "private": hub.repositories.get(id)})
                else:
                    self._answer({"name": "me", "type": "user"})

            def do_HEAD(self) -> None:
                self._send(whole=False)

            def _send(self, whole: bool = True) -> None:
                """Answer what a revision has, or one of its files, under its name or its commit."""
                parts = self.path.partition("?")[0].split("/")
                id, revision = (
                    ("/".join(parts[3:5]), parts[6]) if parts[1] == "api" else ("/".join(parts[1:3]), parts[4])
                )
                found = next(
                    (
                        (commit, files)
                        for (name, label), (commit, files) in hub.revisions.items()
                        if name == id and revision in (label, commit)
                    ),
                    None,
                )
                if found is None:
                    return self._answer({"error": f"Invalid rev id: {revision}"}, 404)
                commit, files = found
                if parts[1] == "api" and parts[5] == "tree":
                    return self._answer(
                        [
                            {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                            for name, body in files.items()
                        ]
                    )
                if parts[1] == "api":
                    return self._answer(
                        {"id": id, "sha": commit, "siblings": [{"rfilename": each} for each in files], "private": False}
                    )
                body = files["/".join(parts[5:])]
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
                self.send_header("X-Repo-Commit", commit)
                self.end_headers()
                if whole:
                    hub.fetched.setdefault(commit, []).append("/".join(parts[5:]))
                    self.wfile.write(body)

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
