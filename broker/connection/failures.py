"""Failures of a connection that need more than a retry: a run that moved to another node, and rejected TLS.

In Redis Cluster all keys of a run share one hash tag, so one node has them all. Any other node names it in its error
(MOVED), also after a failover. With Redis Sentinel, each new connection asks which node is the primary. An invalid
certificate stays invalid, so it is reported at once, not after a deadline.
"""

import ssl
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit, urlunsplit

import redis
from redis.sentinel import MasterNotFoundError, Sentinel

from schemas.errors import ConfigError

MOVING = (redis.exceptions.AskError, redis.exceptions.TryAgainError, redis.exceptions.ClusterDownError)
"""Errors that pass: the run's slot is moving to another node, or has none for a moment."""

DEMOTED = (redis.exceptions.ReadOnlyError, redis.exceptions.MasterDownError)
"""Errors of a replica (READONLY, MASTERDOWN). After a failover the host name in the URL may lead to the new primary,
but an open connection still leads to the old one."""


SENTINEL_TIMEOUT_S = 2.0
"""Longest wait for the answer of one Sentinel, before the next is asked."""


def redirect_url(url: str, moved: redis.exceptions.MovedError) -> str:
    """Return ``url`` with the host and port that a MOVED error names; an empty host is the one that answered."""
    parts = urlsplit(url)
    user, at, _ = parts.netloc.rpartition("@")
    host = moved.host or parts.hostname or ""
    address = f"[{host}]" if ":" in host else host
    query, path, scheme = parts.query, parts.path, parts.scheme
    if scheme == "unix":
        scheme, path = "redis", ""
    return urlunsplit((scheme, f"{user}{at}{address}:{moved.port}", path, query, ""))


class SentinelConnection(redis.Connection):
    """Connection to the primary that Sentinel names: ``redis://SENTINEL:26379/0?sentinel=PRIMARY&sentinels=HOST:PORT,…``.

    Each connect asks the Sentinels in turn, so the first one after a failover leads to the new primary.
    """

    def __init__(self, sentinel: str, sentinels: str = "", sentinel_password: str | None = None, **rest: Any) -> None:
        super().__init__(**rest)  # type: ignore[no-untyped-call]
        options = {name: value for name, value in rest.items() if name.startswith(("ssl_", "retry"))}
        options |= {"ssl": isinstance(self, redis.SSLConnection), "password": sentinel_password}
        options |= {"socket_timeout": SENTINEL_TIMEOUT_S, "socket_connect_timeout": SENTINEL_TIMEOUT_S}
        self._places = [(self.host, self.port), *split_places(sentinels, self.port)]
        self._primary, self._sentinel = sentinel, Sentinel(self._places, sentinel_kwargs=options)  # type: ignore[no-untyped-call]

    def _connect(self) -> Any:
        try:
            self.host, self.port = self._sentinel.discover_master(self._primary)  # type: ignore[no-untyped-call]
        except MasterNotFoundError as error:
            asked = ", ".join(f"{host}:{port}" for host, port in self._places)
            raise redis.ConnectionError(f"no Sentinel names a primary {self._primary!r}, asked {asked}") from error
        return super()._connect()  # type: ignore[no-untyped-call]


class SentinelTlsConnection(SentinelConnection, redis.SSLConnection):
    """The same with TLS, to the Sentinels and to the primary."""


def split_places(places: str, port: int) -> list[tuple[str, int]]:
    """Split ``HOST:PORT,HOST`` into hosts and ports; ValueError if a host is missing or a port is no number."""
    parts = [urlsplit(f"//{place}") for place in places.split(",") if place]
    if not all(part.hostname for part in parts):
        raise ValueError(f"sentinels={places} must be HOST:PORT,HOST:PORT")
    return [(str(part.hostname), part.port or port) for part in parts]


def sentinel_class(url: str, sentinels: str) -> type[SentinelConnection]:
    """Return the class of connections for a URL with ``sentinel=``; ValueError if the URL cannot have that."""
    split_places(sentinels, 0)
    if url.startswith("unix:"):
        raise ValueError("sentinel= needs redis:// or rediss://, with the address of a Sentinel")
    return SentinelTlsConnection if url.startswith("rediss:") else SentinelConnection


FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_REASONS = ("CERTIFICATE", "UNKNOWN_CA")
"""Parts of the reasons with which a server rejects our certificate, or that we have none."""


def check_tls_files(url: str) -> None:
    """Check that the files named in the URL exist; ConfigError otherwise."""
    named = parse_qs(urlsplit(url).query)
    for option in FILES:
        for path in named.get(option, []):
            if not Path(path).is_file():
                raise ConfigError(f"the broker's URL says {option}={path}, which is not a file")


def explain_tls_refusal(error: BaseException) -> str | None:
    """Explain why TLS with this server fails, from the cause of a lost connection; None if a retry may help."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is refused ({cause.verify_message}); give its CA in the URL: ?ssl_ca_certs=FILE"
        if isinstance(cause, ssl.SSLError) and any(reason in (cause.reason or "") for reason in _REASONS):
            return f"it refuses our certificate ({cause.reason}); give one: ?ssl_certfile=FILE&ssl_keyfile=FILE"
        cause = cause.__cause__ or cause.__context__
    return None
