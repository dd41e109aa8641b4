"""The real server under test, and what can be done to it: killed, stopped, and set back to an older append-only file.

Power loss is imitated: kill -9, then the newest part of the append-only file is cut to the size that it had
about a second before. A real power cut may also tear pages; that is not tried here.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from pathlib import Path

import redis

from broker.connection.embedded import EmbeddedServer, wait_ready
from deploy.supervisor.process import Process

KEPT_SIZES = 200


class Server:
    """Valkey or Redis with AOF everysec on a unix socket. ``up`` is False while it is down or stopped on purpose."""

    def __init__(self, folder: Path) -> None:
        self._embedded = EmbeddedServer(folder, fsync="everysec")
        self._embedded.prepare()
        self._process: Process | None = None
        self._sizes: deque[tuple[float, Path, int]] = deque(maxlen=KEPT_SIZES)
        self.up = False
        self.client = redis.Redis.from_url(self._embedded.url, socket_timeout=2.0, protocol=2)

    @property
    def socket(self) -> Path:
        return self._embedded.socket

    @property
    def url(self) -> str:
        return self._embedded.url

    def start(self) -> None:
        """Start it without waiting until it answers."""
        log = self._embedded.folder / "broker.log"
        command = [*self._embedded.command(), "--aof-load-truncated", "yes"]
        self._process = Process(command, "broker", log=log)
        self.up = True

    def wait(self) -> None:
        """Wait until it answers, at most 30 s."""
        wait_ready(self.url, 30.0, self._embedded.folder / "broker.log")

    def answers(self) -> bool:
        """Return whether it runs and has loaded its data."""
        if not self.up:
            return False
        try:
            return bool(self.client.ping())
        except redis.RedisError:
            return False

    def kill(self) -> None:
        """Kill it with SIGKILL; return when it is gone."""
        self.up = False
        if self._process is not None:
            self._process.kill()
            while self._process.poll() is None:
                time.sleep(0.002)
        self.client.connection_pool.disconnect()

    def freeze(self) -> None:
        """SIGSTOP."""
        self.up = False
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)
        self.up = True

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def died(self) -> bool:
        """Whether it ended without being asked to."""
        return self.up and self._process is not None and self._process.poll() is not None

    def sample(self) -> None:
        """Remember the size of the newest part of the append-only file; call it several times a second."""
        file = self._newest_part()
        if file is not None:
            self._sizes.append((time.monotonic(), file, file.stat().st_size))

    def cut(self, age_s: float) -> tuple[float, int] | None:
        """Cut a killed server's file to what it was ``age_s`` ago; (when that was, bytes lost), None if unknown."""
        file = self._newest_part()
        before = time.monotonic() - age_s
        for at, known, size in reversed(self._sizes):
            if known == file and at <= before:
                lost = known.stat().st_size - size
                os.truncate(known, size)
                self._sizes.clear()
                return at, lost
        return None

    def can_cut(self, age_s: float) -> bool:
        file, before = self._newest_part(), time.monotonic() - age_s
        return any(known == file and at <= before for at, known, _ in self._sizes)

    def _newest_part(self) -> Path | None:
        folder = self._embedded.folder / "appendonlydir"
        try:
            manifest = (folder / "appendonly.aof.manifest").read_text()
        except OSError:
            return None
        parts = [line.split()[1] for line in manifest.splitlines() if line.endswith("type i")]
        file = folder / parts[-1] if parts else None
        return file if file is not None and file.is_file() else None

    def stop(self) -> None:
        """Stop it; kill it after 10 s."""
        self.up = False
        if self._process is not None:
            self._process.terminate()
            end = time.monotonic() + 10
            while self._process.poll() is None:
                if time.monotonic() > end:
                    self._process.kill()
                time.sleep(0.02)
