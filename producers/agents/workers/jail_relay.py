"""The first program in an agent's sandbox: ``python jail_relay.py SOCKET PORT FOLDER COMMAND...``.

The sandbox has no network. The relay forwards connections to 127.0.0.1:PORT over the unix socket to the endpoint. It
starts the agent in the folder, and exits with the agent's exit code. Standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Awaitable, Callable

_PART = 1 << 16


async def main() -> int:
    """Relay a TCP port of this network namespace to a Unix socket while a command runs; returns its exit code."""
    path, port, folder, *command = sys.argv[1:]
    server = await asyncio.start_server(relay(lambda: asyncio.open_unix_connection(path)), "127.0.0.1", int(port))
    async with server:
        try:
            agent = await asyncio.create_subprocess_exec(*command, cwd=folder)
        except OSError as error:
            print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)  # noqa: T201
            return 127
        code = await agent.wait()
    return code if code >= 0 else 128 - code


def relay(
    connect: Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]],
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """Return a server's handler of connections, which joins each to a connection that ``connect`` opens."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await connect()
        except OSError:
            writer.close()
            return
        await asyncio.gather(_copy(reader, there[1]), _copy(there[0], writer))

    return carry


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_PART):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()


if __name__ == "__main__":
    os._exit(asyncio.run(main()))
