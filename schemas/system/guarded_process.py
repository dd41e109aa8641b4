"""A process for users' code, which ends with everything that it started.

A guardian (schemas/system/guard.py) stands between this process and the worker. On Linux, daemons and sessions of the
worker therefore end with it, and all of them end with this process. Workers see selected environment
variables, without the service's secrets.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from schemas.system import guard

CLOSE_TIMEOUT_S = 2 * guard.KILL_DEADLINE_S
"""Longest time until a killed worker and all processes below it are gone."""
PASSED_ON = re.compile(
    "PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_.*|TZ|TMPDIR|TEMP|TMP|XDG_(CACHE_HOME|RUNTIME_DIR)"
    "|PYTHON(PATH|HOME|UTF8|IOENCODING)|VIRTUAL_ENV|CONDA_PREFIX|LD_LIBRARY_PATH|DYLD_LIBRARY_PATH"
    "|(CUDA|NVIDIA|ROCR|HIP)_VISIBLE_DEVICES|CUDA_HOME|(OMP|MKL|OPENBLAS|TORCH)_NUM_THREADS|TOKENIZERS_PARALLELISM"
    "|HF_(HOME|HUB_CACHE|HUB_OFFLINE|DATASETS_CACHE|DATASETS_OFFLINE|ENDPOINT)|TRANSFORMERS_OFFLINE"
    "|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE|TIDEMILL_SUPERVISOR"
)
"""Environment variables that workers see; by the last a supervisor recognizes what it started."""


OWN = {"PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV"}
"""Variables that describe this interpreter, so that another one must not see them."""


def environment(further: Collection[str] = (), own: bool = True) -> dict[str, str]:
    """Return the environment of a worker. further: variables that it sees in addition. own: it is this interpreter."""
    passed = {name for name in os.environ if PASSED_ON.fullmatch(name) and (own or name not in OWN)}
    names = passed | os.environ.keys() & set(further)
    return {**{name: os.environ[name] for name in names}, "PYTHONHASHSEED": "0"}


class GuardedProcess:
    """A program behind a guardian. Orders are for any thread, the rest for one.

    Life cycle::

        process = GuardedProcess(["cat"], "cat", environment(), stdin=theirs.fileno(), stdout=theirs.fileno())
        await process.wait()  # until it has ended by itself, and all below it was killed
        process.order_kill()  # at once, waits for nothing
        process.kill()        # "SIGKILL": how it ended; nothing of it is left
    """

    def __init__(
        self,
        program: Sequence[str],
        name: str,
        shown: Mapping[str, str],
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        folder: Path | None = None,
    ) -> None:
        """Start it; OSError if the system can't.

        name: shown in lists of processes. shown: its environment. The guardian keeps its copies of the program's
        files, so their end means that all are gone.
        """
        self._heard = bytearray()
        self._control, guarded = socket.socketpair()
        with guarded:
            try:
                self._control.sendall(json.dumps(list(program)).encode() + b"\n")
                self._guard = subprocess.Popen(
                    [sys.executable, "-I", "-S", guard.__file__, str(guarded.fileno()), name],
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    cwd=folder,
                    env=dict(shown),
                    pass_fds=(guarded.fileno(),),
                    start_new_session=True,
                )
            except BaseException:
                self._control.close()
                raise

    @property
    def pid(self) -> int:
        """Process id of the guardian, which ends after all that it guards."""
        return self._guard.pid

    def order_end(self) -> None:
        """Ask the program alone to end, with SIGTERM."""
        self._order(b"T")

    def order_kill(self) -> None:
        """Have the program and everything below it killed, unless they have ended."""
        self._order(b"K")

    def _order(self, command: bytes) -> None:
        # An error means that the guardian has ended, and with it all that it guarded.
        with contextlib.suppress(OSError):
            self._control.send(command)

    def kill(self) -> str:
        """Kill the program and everything below it, unless it has ended; returns how the program ended."""
        self.order_kill()
        with self._control:
            try:
                self._guard.wait(timeout=CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._guard.kill()
                return f"guardian {self._guard.pid} does not end"
            # Its last words come before the error that it left an order unread.
            with contextlib.suppress(OSError):
                self._control.setblocking(True)
                while part := self._control.recv(256):
                    self._heard += part
        if self.exit_code is None:
            return "its guardian was killed"
        return f"exit code {self.exit_code}" if self.exit_code >= 0 else signal.Signals(-self.exit_code).name

    async def wait(self) -> None:
        """Wait until the program has ended, and all that was left of it."""
        self._control.setblocking(False)
        with contextlib.suppress(ConnectionResetError):
            while part := await asyncio.get_running_loop().sock_recv(self._control, 256):
                self._heard += part

    def poll(self) -> int | None:
        """Exit code of the guardian, or None while anything of the program runs. Reads what the guardian has said."""
        code = self._guard.poll()
        with contextlib.suppress(OSError):
            while part := self._control.recv(256, socket.MSG_DONTWAIT):
                self._heard += part
        if code is not None:
            self._control.close()
        return code

    @property
    def program_pid(self) -> int | None:
        """Process id of the program; None until ``poll`` or ``wait`` has read it."""
        return self._told("pid")

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal; None until ``kill`` or ``wait``, or if the guardian was killed."""
        return self._told("exit")

    def _told(self, word: str) -> int | None:
        said = self._heard.decode().split()
        return int(said[said.index(word) + 1]) if word in said else None
