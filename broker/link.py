"""The connection to the server, and the one place where a lost one is tried again.

redis-py's own retries repeat writes blindly, so they are off: every operation of the
broker is idempotent and is repeated here, with backoff, until a deadline.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any, TypeVar

import redis
import structlog
from redis.backoff import NoBackoff
from redis.retry import Retry

from broker.keys import Keys
from schemas.errors import ConfigError, InfraError

T = TypeVar("T")
SOCKET_TIMEOUT_S = 10.0
"""No single command may take longer; blocking reads wait at most BLOCK_MS."""
BLOCK_MS = 1000
MIN_VERSION = (7, 0)

log = structlog.get_logger()

TRANSIENT = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.exceptions.BusyLoadingError,
    # maxmemory is reached: wait until the trainer has freed some.
    redis.exceptions.OutOfMemoryError,
)


def open_client(url: str) -> redis.Redis:
    """A client without hidden retries; ConfigError when the URL is wrong."""
    try:
        return redis.Redis.from_url(
            url,
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=5.0,
            retry=Retry(NoBackoff(), 0),
            health_check_interval=0,
        )
    except ValueError as error:
        raise ConfigError(f"broker.url {mask(url)!r} is wrong: {error}") from error


def mask(url: str) -> str:
    """The URL without its password, for messages."""
    head, at, tail = url.rpartition("@")
    return f"{head.split('://')[0]}://***@{tail}" if at else url


def check_server(client: redis.Redis, url: str) -> list[str]:
    """Refuse a server that would lose work (ConfigError); return warnings about its persistence."""
    try:
        server: dict[str, Any] = client.info("server")
        memory: dict[str, Any] = client.info("memory")
        persistence: dict[str, Any] = client.info("persistence")
    except redis.RedisError as error:
        raise ConfigError(
            f"cannot use the broker at {mask(url)}: {error}; start a Redis or Valkey 7.0+,"
            " or leave broker.url and REDIS_URL unset for the embedded one"
        ) from error
    version = str(server.get("valkey_version") or server["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
        raise ConfigError(f"the broker at {mask(url)} is version {version}, 7.0 or newer is needed")
    policy = memory.get("maxmemory_policy")
    if policy != "noeviction":
        raise ConfigError(
            f"the broker at {mask(url)} has maxmemory-policy {policy}, which deletes work under pressure;"
            " set maxmemory-policy noeviction"
        )
    if not int(persistence.get("aof_enabled", 0)):
        return [f"the broker at {mask(url)} has no append-only file: a restart of it loses what is in flight"]
    return []


class Link:
    """One process's way to the broker: commands and scripts, repeated until ``deadline_s``."""

    def __init__(self, url: str, keys: Keys, deadline_s: float) -> None:
        self.url = url
        self.keys = keys
        self.deadline_s = deadline_s
        self.client = open_client(url)
        self.losses = 0
        """How often the connection was lost; readers look at their own pending entries when it changes."""
        self._scripts: dict[str, str] = {}
        self._lock = threading.Lock()

    def run(self, what: str, operation: Callable[..., T], *args: Any) -> T:
        """Do an idempotent ``operation(client, *args)``; InfraError after the deadline says what could not be done."""
        start = time.monotonic()
        wait = 0.05
        while True:
            try:
                return operation(self.client, *args)
            except TRANSIENT as error:
                self.losses += 1
                waited = time.monotonic() - start
                if waited > self.deadline_s:
                    raise InfraError(
                        f"the broker at {mask(self.url)} did not answer for {waited:.0f} s while {what}: {error}"
                    ) from error
                log.warning("waiting for the broker", doing=what, waited_s=round(waited, 1), error=str(error))
            threading.Event().wait(wait)
            wait = min(wait * 2, 2.0)

    def script(self, name: str, *args: str | bytes | int | float) -> Any:
        """Run one of lua/*.lua on the run's keys, retried like any operation."""
        return self.run(name, self._evaluate, name, args)

    def scripts(self, name: str, calls: Sequence[Sequence[str | bytes | int | float]]) -> list[Any]:
        """Run one script several times in one round trip; each call is as atomic as alone."""
        return self.run(name, self._evaluate_all, name, calls)

    def _evaluate_all(self, client: redis.Redis, name: str, calls: Sequence[Sequence[Any]]) -> list[Any]:
        keys = self.keys.scripted
        for load in (False, True):
            sha = self._load(client, name) if load else self._scripts.get(name) or self._load(client, name)
            pipe = client.pipeline(transaction=False)
            for args in calls:
                pipe.evalsha(sha, len(keys), *keys, *args)
            try:
                return list(pipe.execute())
            except redis.exceptions.NoScriptError:
                continue
        raise InfraError(f"the broker at {mask(self.url)} forgets the script {name} as soon as it is loaded")

    def _evaluate(self, client: redis.Redis, name: str, args: tuple[Any, ...]) -> Any:
        sha = self._scripts.get(name) or self._load(client, name)
        keys = self.keys.scripted
        try:
            return client.evalsha(sha, len(keys), *keys, *args)
        except redis.exceptions.NoScriptError:
            return client.evalsha(self._load(client, name), len(keys), *keys, *args)

    def _load(self, client: redis.Redis, name: str) -> str:
        with self._lock:
            sha = str(client.script_load(source(name)))
            self._scripts[name] = sha
        return sha


def source(name: str) -> str:
    """Text of one script: its shebang if it has one, the shared prelude, its own body."""
    folder = resources.files("broker") / "lua"
    body = (folder / f"{name}.lua").read_text(encoding="utf-8")
    prelude = (folder / "prelude.lua").read_text(encoding="utf-8")
    if body.startswith("#!"):
        shebang, _, body = body.partition("\n")
        return f"{shebang}\n{prelude}\n{body}"
    return f"{prelude}\n{body}"


def url_from(configured: str | None) -> str | None:
    """The server to use: the configuration's, else REDIS_URL's; None asks for an embedded one."""
    return configured or os.environ.get("REDIS_URL") or None
