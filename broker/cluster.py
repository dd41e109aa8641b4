"""Redis Cluster: all keys of a run share one hash tag, so one node has them all, and a service only has to find it.

Any node names the owner of a key in its refusal (MOVED), which is also how a failover and a moved slot are noticed.
"""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit

import redis

MOVING = (redis.exceptions.AskError, redis.exceptions.TryAgainError, redis.exceptions.ClusterDownError)
"""Refusals that pass: the run's slot is on its way to another node, or has none for a moment."""


def redirected(url: str, moved: redis.exceptions.MovedError) -> str:
    """The URL of the node that a refusal names, with all else as in ``url``. An empty host is the one we asked."""
    parts = urlsplit(url)
    user, at, _ = parts.netloc.rpartition("@")
    host = moved.host or parts.hostname or ""
    address = f"[{host}]" if ":" in host else host
    query, path, scheme = parts.query, parts.path, parts.scheme
    if scheme == "unix":
        scheme, path = "redis", ""
    return urlunsplit((scheme, f"{user}{at}{address}:{moved.port}", path, query, ""))
