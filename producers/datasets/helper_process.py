"""The process of a dataset whose examples are made by another interpreter, or with settings of its own."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from schemas.errors import ConfigError, InfraError

START_TIMEOUT_S = 120.0
ITEM_TIMEOUT_S = 60.0


class HelperProcess:
    """Speaks a JSON line each way, on its stdin and stdout; ends when its socket closes.

    name: of what makes the examples. recipe: the first line that it gets; ``hello`` is its answer. ConfigError if that
    has an ``error``.
    """

    def __init__(
        self, name: str, program: Sequence[str], environment: Mapping[str, str], recipe: dict[str, Any]
    ) -> None:
        self._name, self._program, self._environment, self._recipe = name, program, environment, recipe
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._end: weakref.finalize[Any, HelperProcess] | None = None
        self.hello: dict[str, Any] = {}
        self._start()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer; InfraError if there is none."""
        with self._lock:
            try:
                return self._exchange(request, ITEM_TIMEOUT_S)
            except InfraError:
                # A process that died is replaced once: nothing of it was state.
                self.close()
                return self._exchange(request, ITEM_TIMEOUT_S)

    def close(self) -> None:
        """End the process; it is started again when needed."""
        if self._end is not None:
            self._end()
        self._socket = None

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        try:
            process = subprocess.Popen(
                self._program, stdin=theirs.fileno(), stdout=theirs.fileno(), env=self._environment
            )
        except OSError as error:
            ours.close()
            raise InfraError(f"cannot start the {self._name} process: {error}") from error
        finally:
            theirs.close()
        self._socket = ours
        self._end = weakref.finalize(self, _end, process, ours)
        try:
            self.hello = self._exchange(self._recipe, START_TIMEOUT_S)
        except (InfraError, ConfigError):
            self.close()
            raise
        return ours

    def _exchange(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        connection = self._socket or self._start()
        try:
            connection.settimeout(timeout_s)
            connection.sendall(json.dumps(request).encode() + b"\n")
            reply = _read_line(connection)
        except TimeoutError:
            raise InfraError(f"{self._name} made no example within {timeout_s:g} s: {request}") from None
        except OSError as error:
            raise InfraError(f"the {self._name} process ended: {error}") from error
        if "error" in reply:
            raise ConfigError(f"dataset {self._name.replace('-', '_')!r}: {reply['error']}")
        return reply


def _read_line(connection: socket.socket) -> dict[str, Any]:
    parts: list[bytes] = []
    while not parts or not parts[-1].endswith(b"\n"):
        part = connection.recv(65536)
        if not part:
            raise ConnectionError("it closed its output")
        parts.append(part)
    reply: dict[str, Any] = json.loads(b"".join(parts))
    return reply


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait(timeout=10)
