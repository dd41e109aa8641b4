"""A server that this generator launches, in its own process group, and that ends with the generator.

A guardian (schemas/system/guard.py) makes sure that no process of the server outlives this one, however it ends. The
server's output goes to stderr; its last lines are kept for the reason of its end.

Every user of a machine reaches its loopback: a server without a key would load any user's weights. So it
listens on a socket in a folder that only this user can enter, or on a port with a key for all of its routes.
"""

import asyncio
import os
import secrets
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from schemas.errors import ConfigError
from schemas.system.guarded_process import GuardedProcess

HOST = "127.0.0.1"
_TAIL = 12
_ASK_S = 3.0
"""The time for a server to end after it was asked to. It holds nothing that needs saving."""


def free_port() -> int:
    """Return a port on which no program listens."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class PrivatePlace:
    """Where a launched server can listen out of the reach of other users: a folder of this user, a key, a free port."""

    def __init__(self) -> None:
        self._made = tempfile.TemporaryDirectory(prefix="tidemill-server-")
        self.folder = Path(self._made.name)
        self.key = secrets.token_urlsafe(32)
        self.port = free_port()

    @property
    def socket(self) -> Path:
        """The path of a unix socket."""
        return self.folder / "server.sock"

    def close(self) -> None:
        """Remove the folder."""
        self._made.cleanup()


class LaunchedServer:
    """The server's processes. ended: done when the last of them has ended by itself; its result is the reason."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the server, in a running event loop. ConfigError if the system can't start it."""
        self._lines: deque[str] = deque(maxlen=_TAIL)
        output, theirs = os.pipe()
        try:
            with open(os.devnull, "rb") as nothing:
                self._process = GuardedProcess(
                    command,
                    "inference-server",
                    # Python must not import modules from the folder that the run is started in.
                    {"PYTHONSAFEPATH": "1", **environment, **os.environ},
                    stdin=nothing.fileno(),
                    stdout=theirs,
                    stderr=theirs,
                )
        except OSError as error:
            os.close(output)
            raise ConfigError(f"generator.http.command {command[0]}: {error.strerror}") from error
        finally:
            os.close(theirs)
        self._reading = asyncio.create_task(self._read(output))
        self.ended = asyncio.create_task(self._wait())

    async def _read(self, output: int) -> None:
        reader = asyncio.StreamReader()
        pipe = os.fdopen(output, "rb", 0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            while line := await _next_line(reader):
                text = line.decode(errors="replace").rstrip()
                self._lines.append(text)
                print(text, file=sys.stderr, flush=True)  # noqa: T201 - the server's own words
        finally:
            transport.close()

    async def _wait(self) -> str:
        await self._process.wait()
        code = self._process.exit_code
        if code is None or code < 0:
            # The last lines of its output are unrelated to that.
            return "the server was lost" if code is None else f"the server was killed by signal {-code}"
        await asyncio.wait({self._reading}, timeout=1.0)
        return f"the server ended with exit code {code}{self.last_words()}"

    def last_words(self) -> str:
        """Return the last informative line of the output, for an error message."""
        informative = [line for line in self._lines if "rror" in line] or list(self._lines)
        return f": {informative[-1].strip()[:300]}" if informative else ""

    async def close(self) -> None:
        """Ask the server to end, kill the rest, and wait until all processes are gone."""
        self._process.order_end()
        await asyncio.wait({self.ended}, timeout=_ASK_S)
        await asyncio.to_thread(self._process.kill)
        for task in (self.ended, self._reading):
            task.cancel()
        await asyncio.gather(self.ended, self._reading, return_exceptions=True)


async def _next_line(reader: asyncio.StreamReader) -> bytes:
    """Return the next line, or the beginning of one that is too long; empty at the end."""
    try:
        return await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await reader.read(error.consumed)
