"""The connection to the server, and the one place that retries after it was lost.

redis-py's own retries repeat writes blindly, so they are off. Every operation of the broker is idempotent, and is
retried here, with backoff, until a deadline.
"""

import functools
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from operator import methodcaller
from pathlib import Path
from typing import Any, TypeVar

import redis
import structlog
from redis.backoff import NoBackoff
from redis.connection import HiredisRespSerializer
from redis.retry import Retry

from broker.connection import failures
from broker.connection.failures import DEMOTED, MOVING, redirect_url
from broker.connection.keys import Keys
from broker.connection.scripts import LuaScript
from schemas.errors import BrokerLost, ConfigError, InfraError
from schemas.urls import hide_password

T = TypeVar("T")
SOCKET_TIMEOUT_S = 10.0
"""Longest time of a single command; blocking reads wait at most BLOCK_MS."""
BLOCK_MS = 1000
CONNECTIONS = 8
"""Most connections of a process: three that wait for changes, one for heartbeats, and some for work. A thousand
generators that end at once, each in many threads, stay below the 10,000 clients that a server accepts by default."""
MIN_VERSION = (7, 0)

log = structlog.get_logger()

ELSEWHERE = (redis.AuthenticationError, redis.exceptions.NoPermissionError)
"""Errors of redis-py that do not pass by waiting."""

FORBIDDEN = ("user executing the script", "ACL failure in script", "SELECT is not allowed", "DB index is out of range")
"""Parts of the text of such errors that have no type in redis-py."""

WAITABLE = frozenset({"OOM", "MISCONF", "LOADING", "NOREPLICAS", "BUSY", "NOSCRIPT"})
"""Codes of errors that pass: memory or disk is full, the server is starting, replicas are missing, another script
runs long, or scripts were flushed (or the server replaced) between loading and calling one."""

FREE_BYTES = 1 << 20
"""Memory to free, by dropping dead letters, when work was refused because memory is full."""

ABORTED = "Transaction discarded because of: "
"""Precedes the error of a whole transaction; redis-py removes what stands before it."""

GONE = frozenset({"NOGROUP", "UNBLOCKED"})
"""Codes of the error for a reader whose stream or group was deleted."""


LARGE_BODY = 4096
"""Bytes of a body above which copying costs more than packing in Python."""


class CommandPacker(HiredisRespSerializer):
    """Packs commands for the wire. hiredis copies each argument three times; large bodies in HSET are packed here."""

    def pack(self, *args: Any) -> list[bytes]:
        """Encode one command. A large body in HSET is copied once, by Python."""
        body = args[-1]
        large = type(body) is bytes and len(body) >= LARGE_BODY
        if not large or args[0] != "HSET" or not {str, bytes}.issuperset(map(type, args)):
            packed: list[bytes] = super().pack(*args)
            return packed
        pieces = [b"*%d\r\n" % len(args)]
        for arg in args:
            data = arg if type(arg) is bytes else arg.encode()
            pieces += (b"$%d\r\n" % len(data), data, b"\r\n")
        return [b"".join(pieces)]


def open_client(url: str, connected: Callable[[], None] | None = None) -> redis.Redis:
    """Return a client without hidden retries; ConfigError if the URL is invalid.

    connected: called after each connection, including those that the client replaces silently.
    """
    failures.check_tls_files(url)

    def on_connect(connection: Any) -> None:
        connection.on_connect()
        if connected is not None:
            connected()

    try:
        pool = redis.BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=SOCKET_TIMEOUT_S,
            redis_connect_func=on_connect,
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=5.0,
            retry=Retry(NoBackoff(), 0),
            health_check_interval=0,
            command_packer=CommandPacker(),
        )
        if "sentinel" in pool.connection_kwargs:
            pool.connection_class = failures.sentinel_class(url, pool.connection_kwargs.get("sentinels", ""))
    except ValueError as error:
        # If the password contains a slash, a part of it is taken for the port and appears in the error.
        why = "a / ? # in its password must be %2F %3F %23" if "@" in url and "Port" in str(error) else error
        raise ConfigError(f"broker.url {hide_password(url)!r} is wrong: {why}") from error
    return redis.Redis.from_pool(pool)


def check_server(client: redis.Redis, url: str) -> list[str]:
    """Check that the server can't lose work, else ConfigError; return warnings about its persistence."""
    server: dict[str, Any] = client.info("server")
    memory: dict[str, Any] = client.info("memory")
    persistence: dict[str, Any] = client.info("persistence")
    version = str(server.get("valkey_version") or server["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
        raise ConfigError(f"the broker at {hide_password(url)} is version {version}, 7.0 or newer is needed")
    policy = memory.get("maxmemory_policy")
    if policy != "noeviction":
        raise ConfigError(
            f"the broker at {hide_password(url)} has maxmemory-policy {policy}, which deletes work under pressure;"
            " set maxmemory-policy noeviction"
        )
    if not int(persistence.get("aof_enabled", 0)):
        return [f"the broker at {hide_password(url)} has no append-only file: a restart of it loses what is in flight"]
    return []


def check_server_now(url: str) -> list[str]:
    """Like ``check_server``, but raise ConfigError at once if the server does not answer, since a user waits."""
    try:
        return check_server(open_client(url), url)
    except redis.RedisError as error:
        if why := failures.explain_tls_refusal(error):
            raise ConfigError(f"cannot use the broker at {hide_password(url)}: {why}") from error
        raise ConfigError(
            f"cannot use the broker at {hide_password(url)}: {error}; start a Redis or Valkey 7.0+,"
            " or leave broker.url and REDIS_URL unset for the embedded one"
        ) from error


def error_code(error: redis.RedisError) -> str:
    """Return the error code, the first word of a server's error; redis-py removes some of them."""
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return "OOM"
    if isinstance(error, redis.exceptions.BusyLoadingError):
        return "LOADING"
    if isinstance(error, redis.exceptions.NoScriptError):
        return "NOSCRIPT"
    return str(error).rpartition(" of pipeline caused error: ")[2].removeprefix(ABORTED).partition(" ")[0]


class Connection:
    """The broker connection of a process: runs commands and scripts, and retries them until ``deadline_s``."""

    def __init__(self, url: str, keys: Keys, deadline_s: float) -> None:
        self.url = url
        self.keys = keys
        self.deadline_s = deadline_s
        self._nodes = [url]
        """URLs of the nodes that may have the run's keys, the likeliest first; a cluster may have them elsewhere."""
        self._settled = False
        self.client = open_client(url, self._connected)
        self.connections = 0
        """Number of connections made so far; another server may answer on a new one."""
        self.losses = 0
        """Number of lost replies; readers check their own pending entries when it changes."""
        self.authority = False
        """Whether this process repairs a damaged broker (the trainer); the others wait for that."""
        self._script = functools.cache(functools.partial(LuaScript.named, keys=keys))
        self._loaded: dict[str, int] = {}
        """Scripts that the server has loaded, with the value of ``connections`` at that time."""
        self._lost_at: float | None = None

    def _connected(self) -> None:
        self.connections += 1

    def silent_s(self) -> float:
        """Return for how many seconds every attempt has failed for want of an answer; 0 if the last one had one."""
        since = self._lost_at
        return 0.0 if since is None else time.monotonic() - since

    def run(self, what: str, operation: Callable[..., T], *args: Any, once: bool = False) -> T:
        """Run an idempotent ``operation(client, *args)``; after the deadline, InfraError names it by ``what``.

        once: without retries, for what is repeated anyway and must not delay its caller. BrokerLost, for the authority
        only, if a key has the wrong type.
        """
        start = time.monotonic()
        wait = 0.05
        while True:
            try:
                return self._try(operation, args)
            except redis.RedisError as error:
                self._raise_unless_temporary(what, error)
                waited = time.monotonic() - start
                if once or waited > self.deadline_s:
                    time_s = "" if once else f" for {waited:.0f} s"
                    raise InfraError(
                        f"the broker at {hide_password(self.url)} did not answer{time_s} while {what}: {error}"
                    ) from error
                if not isinstance(error, redis.exceptions.MovedError):
                    log.warning("waiting for the broker", doing=what, waited_s=round(waited, 1), error=str(error))
            # Each service at its own moment: a broker that comes back has to answer all of them.
            threading.Event().wait(random.uniform(wait / 2, wait))
            wait = min(wait * 2, 2.0)

    def run_command(self, what: str, name: str, *args: Any, once: bool = False, **options: Any) -> Any:
        """Run one command, by its name in redis-py, retried like any operation."""
        return self.run(what, methodcaller(name, *args, **options), once=once)

    def newest_entry(self, what: str, stream: str, once: bool = False) -> bytes:
        """Return the id of a stream's newest entry: read it before the state that may change, and wait after it."""
        found = self.run_command(what, "xrevrange", stream, count=1, once=once)
        return bytes(found[0][0]) if found else b"0-0"

    def read_fields(self, what: str, key: str, fields: Sequence[str | bytes], at_once: int = 64) -> list[bytes | None]:
        """Read fields of a hash, ``at_once`` in a round trip; None for a missing one."""
        parts = [fields[first : first + at_once] for first in range(0, len(fields), at_once)]
        return [value for part in parts for value in self.run_command(what, "hmget", key, part)]

    def _try(self, operation: Callable[..., T], args: tuple[Any, ...]) -> T:
        if not self._settled:
            # A node without the run's keys refuses this command, but would answer INFO or TIME about itself.
            self.client.exists(self.keys.services)
            self._settled = True
        answer = operation(self.client, *args)
        self._lost_at = None
        return answer

    def _raise_unless_temporary(self, what: str, error: redis.RedisError) -> None:
        if isinstance(error, ELSEWHERE) or any(text in str(error) for text in FORBIDDEN):
            raise ConfigError(f"the broker at {hide_password(self.url)} refuses {what}: {error}") from error
        if isinstance(error, redis.ConnectionError | redis.TimeoutError):
            if why := failures.explain_tls_refusal(error):
                raise ConfigError(f"cannot use the broker at {hide_password(self.url)}: {why}") from error
            self.losses += 1
            self._lost_at = self._lost_at or time.monotonic()
            self._use_nodes([*self._nodes[1:], self._nodes[0]])
            return
        if isinstance(error, redis.exceptions.MovedError):
            self._use_nodes([redirect_url(self.url, error), self.url])
            return
        # Blocked readers get UNBLOCKED when a server is no longer a primary.
        if isinstance(error, DEMOTED) or "instance state changed" in str(error):
            self._use_nodes(self._nodes, reconnect=True)
            return
        if isinstance(error, MOVING):
            return
        if error_code(error) == "WRONGTYPE" or "WRONGTYPE" in str(error):
            if self.authority:
                raise BrokerLost(f"a key of the run was replaced while {what}: {error}") from error
            return
        if error_code(error) not in WAITABLE:
            raise error
        if error_code(error) == "OOM":
            self._drop_dead_letters()

    def _drop_dead_letters(self) -> None:
        """Free memory for work. If that fails, the next attempt of the operation shows why."""
        try:
            dropped = self._evaluate(self.client, "drop_dead_letters", (FREE_BYTES,))
        except redis.RedisError as error:
            log.debug("no dead letter could be dropped", error=str(error))
            return
        if dropped:
            log.warning("the broker's memory is full: the oldest dead letters were dropped", letters=dropped)

    def _use_nodes(self, nodes: list[str], reconnect: bool = False) -> None:
        """Use the first of these nodes from now on. reconnect: open new connections, even if the node is the same."""
        if reconnect or nodes[0] != self._nodes[0]:
            self.client = open_client(nodes[0], self._connected)
        self._nodes = nodes
        self._settled = False

    def run_script(self, name: str, *args: str | bytes | int | float, once: bool = False) -> Any:
        """Run one script of lua/ on the keys it declares, retried like any operation."""
        return self.run(name, self._evaluate, name, args, once=once)

    def run_scripts(self, name: str, calls: Sequence[Sequence[str | bytes | int | float]]) -> list[Any]:
        """Run one script several times in one round trip; each call is atomic."""
        return self.run(name, self._evaluate_all, name, calls)

    def run_script_with_fields(
        self, name: str, key: str, calls: Sequence[tuple[Sequence[str | bytes], Sequence[str | bytes | int | float]]]
    ) -> list[Any]:
        """Set fields of the hash ``key`` and run one script, for each call in one transaction.

        A call is a list of fields and values in turn, and the script's arguments. Large values reach the server this
        way without passing through Lua, which would copy them three times.
        """
        return self.run(name, self._evaluate_with_fields, name, key, calls)

    def _evaluate_with_fields(
        self, client: redis.Redis, name: str, key: str, calls: Sequence[tuple[Sequence[Any], Sequence[Any]]]
    ) -> list[Any]:
        script = self._script(name)
        if self._loaded.get(name) != self.connections:
            # A transaction is not undone if its script is unknown, so the script is loaded before.
            client.script_load(script.text)
            self._loaded[name] = self.connections
        pipe: Any = client.pipeline(transaction=False)
        for fields, args in calls:
            pipe.execute_command("MULTI")
            pipe.execute_command("HSET", key, *fields)
            script.send(pipe, args)
            pipe.execute_command("EXEC")
        answers = []
        for replies in pipe.execute()[3::4]:
            if failed := next((reply for reply in replies if isinstance(reply, redis.ResponseError)), None):
                if isinstance(failed, redis.exceptions.NoScriptError):
                    self._loaded.pop(name, None)
                raise failed
            answers.append(replies[1])
        return answers

    def _evaluate(self, client: redis.Redis, name: str, args: tuple[Any, ...]) -> Any:
        return self._script(name).call(client, args)

    def _evaluate_all(self, client: redis.Redis, name: str, calls: Sequence[Sequence[Any]]) -> list[Any]:
        script = self._script(name)

        def run() -> list[Any]:
            pipe = client.pipeline(transaction=False)
            for args in calls:
                script.send(pipe, args)
            return list(pipe.execute())

        try:
            return run()
        except redis.exceptions.NoScriptError:
            client.script_load(script.text)
            return run()


class RunData:
    """A part of a run's data in the broker. max_bytes: most bytes of a message."""

    def __init__(self, connection: Connection, max_bytes: int = 0) -> None:
        self._connection = connection
        self._keys = connection.keys
        self._max_bytes = max_bytes


def find_url(configured: str | None) -> str | None:
    """Return the server's URL: the configured one, else REDIS_URL, else the content of the file REDIS_URL_FILE.

    None asks for an embedded server. ConfigError if the file can't be read or is empty.
    """
    if url := configured or os.environ.get("REDIS_URL"):
        return url
    file = os.environ.get("REDIS_URL_FILE")
    if not file:
        return None
    try:
        url = Path(file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"cannot read REDIS_URL_FILE {file}: {error.strerror}") from error
    if not url:
        raise ConfigError(f"REDIS_URL_FILE {file} is empty: it must hold a redis:// or rediss:// URL")
    return url
