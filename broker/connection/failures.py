"""Failures of a connection that need more than another try: a run that moved to another node, and refused TLS.

In Redis Cluster all keys of a run share one hash tag, so one node has them all; any other names it in its refusal
(MOVED), also after a failover. Wrong certificates stay wrong, so the user is told at once, not after a deadline.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from urllib.parse import parse_qs, urlsplit, urlunsplit

import redis

from schemas.errors import ConfigError

MOVING = (redis.exceptions.AskError, redis.exceptions.TryAgainError, redis.exceptions.ClusterDownError)
"""Refusals that pass: the run's slot is on its way to another node, or has none for a moment."""

DEMOTED = (redis.exceptions.ReadOnlyError, redis.exceptions.MasterDownError)
"""Refusals of a replica (READONLY, MASTERDOWN). After a failover the name in the URL may lead to the new primary, but
a connection that is open leads to the old one for ever."""


def is_demotion(error: redis.RedisError) -> bool:
    """Whether a server refuses because it is no primary any more; readers that waited there are told UNBLOCKED."""
    return isinstance(error, DEMOTED) or "instance state changed" in str(error)


def redirect_url(url: str, moved: redis.exceptions.MovedError) -> str:
    """The URL of the node that a refusal names, with all else as in ``url``. An empty host is the one we asked."""
    parts = urlsplit(url)
    user, at, _ = parts.netloc.rpartition("@")
    host = moved.host or parts.hostname or ""
    address = f"[{host}]" if ":" in host else host
    query, path, scheme = parts.query, parts.path, parts.scheme
    if scheme == "unix":
        scheme, path = "redis", ""
    return urlunsplit((scheme, f"{user}{at}{address}:{moved.port}", path, query, ""))


FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_REASONS = ("CERTIFICATE", "UNKNOWN_CA")
"""In what a server says that refuses our certificate, or that we have none."""


def check_tls_files(url: str) -> None:
    """ConfigError when a file that the URL names is not there."""
    named = parse_qs(urlsplit(url).query)
    for option in FILES:
        for path in named.get(option, []):
            if not Path(path).is_file():
                raise ConfigError(f"the broker's URL says {option}={path}, which is not a file")


def explain_tls_refusal(error: BaseException) -> str | None:
    """Why TLS with this server can't be, from the cause of a lost connection; None when trying again may help."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is refused ({cause.verify_message}); give its CA in the URL: ?ssl_ca_certs=FILE"
        if isinstance(cause, ssl.SSLError) and any(reason in (cause.reason or "") for reason in _REASONS):
            return f"it refuses our certificate ({cause.reason}); give one: ?ssl_certfile=FILE&ssl_keyfile=FILE"
        cause = cause.__cause__ or cause.__context__
    return None
