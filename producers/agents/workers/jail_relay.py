"""The first program in an agent's sandbox: ``python jail_relay.py SOCKET PORT FOLDER COMMAND...``.

The sandbox has no network. The relay forwards connections to 127.0.0.1:PORT over the unix socket to the endpoint. It
starts the agent in the folder, and exits with the agent's exit code. Standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys

_PART = 1 << 16


async def main() -> int:
    """Listen, and run the agent to its end."""
    path, port, folder, *command = sys.argv[1:]

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_unix_connection(path)
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, there[1]), copy(there[0], writer))

    server = await asyncio.start_server(carry, "127.0.0.1", int(port))
    async with server:
        try:
            agent = await asyncio.create_subprocess_exec(*command, cwd=folder)
        except OSError as error:
            print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)  # noqa: T201
            return 127
        code = await agent.wait()
    return code if code >= 0 else 128 - code


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until one side ends."""
    with contextlib.suppress(OSError):
        while data := await reader.read(_PART):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()


if __name__ == "__main__":
    os._exit(asyncio.run(main()))
