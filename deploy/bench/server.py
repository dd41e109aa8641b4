"""The server under test: an embedded one of its own, or one that the user names; and what it used."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.connection.connection import open_client
from broker.connection.embedded import EmbeddedServer

AOF_MODES = ("off", "everysec", "always")


@contextmanager
def serving(url: str | None, aof: str) -> Iterator[str]:
    """URL of a server whose append-only file is ``aof``; a user's own is left as it is."""
    if url is not None:
        yield url
        return
    with tempfile.TemporaryDirectory(prefix="tidemill-bench-") as folder:
        server = EmbeddedServer(Path(folder), fsync="everysec" if aof == "off" else aof)
        started = server.start()
        try:
            if aof == "off":
                open_client(started).config_set("appendonly", "no")
            yield started
        finally:
            server.stop()


@dataclass(frozen=True)
class Usage:
    """What the server has used since it started: processor seconds, bytes in and out; bytes of memory now."""

    cpu_s: float
    wire: int
    memory: int

    @classmethod
    def of(cls, url: str) -> Usage:
        """Read it."""
        info: dict[str, Any] = open_client(url).info()
        return cls(
            cpu_s=float(info["used_cpu_user"]) + float(info["used_cpu_sys"]),
            wire=int(info["total_net_input_bytes"]) + int(info["total_net_output_bytes"]),
            memory=int(info["used_memory"]),
        )


def describe(url: str) -> str:
    """Name and version of the server."""
    info: dict[str, Any] = open_client(url).info("server")
    version = info.get("valkey_version")
    return f"valkey {version}" if version else f"redis {info['redis_version']}"
