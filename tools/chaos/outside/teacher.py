"""A teacher in a server of its own: ``python -m tools.chaos.outside.teacher PORT``, with ``--teacher``.

It answers OpenAI's completions with ``echo`` and ``logprobs``. Each log-probability follows from the token ids before
it and its own, so that the judge recognises the answer to another sample.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import zlib
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

from deploy.supervisor.process import Process
from schemas.messages import Trajectory
from schemas.system import guard
from tools.chaos.processes import free_port

SMALLEST = 1e-5


class Teacher:
    """The server as a process, which faults kill and freeze."""

    def __init__(self, folder: Path) -> None:
        self._port, self._log = free_port(), folder / "logs" / "teacher.log"
        self._process: Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    @property
    def up(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it without waiting until it answers."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "tools.chaos.outside.teacher", str(self._port)]
        self._process = Process(command, "teacher", log=self._log)

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        if self._process is not None:
            self._process.kill()

    def signal(self, number: int) -> None:
        """Send it a signal, if it is there."""
        if self.up and self._process is not None and self._process.pid is not None:
            os.kill(self._process.pid, number)


def says(ids: Sequence[int]) -> list[float]:
    """The log-probability of each token after the first."""
    found, before = [], 0
    for token in ids:
        before = zlib.crc32(int(token).to_bytes(4, "little"), before)
        found.append(-1.0 - before / 2**32)
    return found[1:]


def is_taught(sample: Trajectory) -> bool:
    """Whether a sample has what the teacher says of its own tokens."""
    given = sample.teacher_logprobs
    if given is None:
        return False
    tokens, known, mask = sample.tokens.numpy(), given.numpy(), sample.loss_mask.numpy()
    for row in sample.rows():
        own = row.places[max(row.shared, 1) :]
        want = np.array([0.0, *says(tokens[row.places].tolist())])[max(row.shared, 1) :]
        if (np.abs(known[own] - want) * mask[own]).max(initial=0.0) > SMALLEST:
            return False
    return True


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        ids = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        said = {"choices": [{"text": "", "logprobs": {"token_logprobs": [None, *says(ids), -1.0]}}]}
        content = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


if __name__ == "__main__":
    guard.prctl(guard.PR_SET_PDEATHSIG, signal.SIGKILL)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), _Handler).serve_forever()
