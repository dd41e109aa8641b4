"""Rehearsals in a process of their own, which imports PyTorch once and forks for each question.

A rehearsal changes the process that it runs in (its kernels, its process group), and PyTorch takes seconds to import.
As a program it listens at a socket, whose path it gets, until no question has come for IDLE_S seconds or its parent is
gone. Question and answer are each a line of JSON.
"""

import importlib
import json
import os
import select
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from schemas.errors import TidemillError

IDLE_S = 60.0
POLL_S = 0.5


class RehearsalProcess:
    """A client, for many threads. It starts the process at the first question, and again if that is gone."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    @cached_property
    def _folder(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="tidemill-rehearsal-")

    @property
    def _socket(self) -> Path:
        return Path(self._folder.name, "socket")

    def ask(self, question: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Return the answer; TimeoutError after ``limit_s`` seconds, TidemillError if the process can't answer."""
        ends = time.monotonic() + limit_s
        line = ""
        with suppress(ConnectionError), self._connect(limit_s) as connection:
            connection.settimeout(max(0.001, ends - time.monotonic()))
            connection.sendall(json.dumps({**question, "limit_s": limit_s}).encode() + b"\n")
            with connection.makefile() as lines:
                line = lines.readline()
        if not line.endswith("\n"):
            raise TidemillError("the process that computes it was killed, perhaps for its memory")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise TidemillError(answer["failed"])
        return answer

    def _connect(self, limit_s: float) -> socket.socket:
        with self._starting:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(self._socket))
            except (FileNotFoundError, ConnectionRefusedError):
                self._start(limit_s)
                connection.connect(str(self._socket))
            return connection

    def _start(self, limit_s: float) -> None:
        self._socket.unlink(missing_ok=True)
        log = Path(self._folder.name, "log")
        with log.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(self._socket)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            )
        assert process.stdout is not None
        with process.stdout as listening:
            if not select.select([listening], [], [], limit_s)[0]:
                process.kill()
                process.wait()
                raise TimeoutError
            if not listening.readline():
                reason = (log.read_text().strip().splitlines() or ["no reason given"])[-1]
                raise TidemillError(f"the process that computes it cannot start: {reason}")
        # Kept, so that it is reaped.
        self._process = process


class _Server(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    timeout = POLL_S
    max_children = 2 * (os.cpu_count() or 1)

    def __init__(self, path: str) -> None:
        super().__init__(path, _Question)
        self.path = Path(path)
        self.asked = time.monotonic()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        self.asked = time.monotonic()
        return True

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        request.sendall(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode() + b"\n")

    def serve(self) -> None:
        parent = os.getppid()
        while os.getppid() == parent and (self.active_children or time.monotonic() - self.asked < IDLE_S):
            self.handle_request()
        # Questions that arrived before this are answered; later ones start another process.
        self.path.unlink()
        self.timeout = 0
        while select.select([self], [], [], 0)[0]:
            self.handle_request()
        self.server_close()
        if os.getppid() != parent:
            shutil.rmtree(self.path.parent, ignore_errors=True)


class _Question(socketserver.StreamRequestHandler):
    """One question, in a fork of the server."""

    def handle(self) -> None:
        from deploy.planning.rehearsal import answer

        question = json.loads(self.rfile.readline())
        # The process that asked waits no longer.
        signal.setitimer(signal.ITIMER_REAL, question.pop("limit_s") + 1)
        self.wfile.write(json.dumps(answer(question)).encode() + b"\n")


def main() -> None:
    """Answer questions at the socket whose path is the only argument."""
    # Before the first fork, since it takes seconds.
    importlib.import_module("deploy.planning.rehearsal")
    with _Server(sys.argv[1]) as server:
        print("listening", flush=True)
        server.serve()


if __name__ == "__main__":
    main()
