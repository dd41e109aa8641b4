"""The runs on one server: found by their keys, measured, deleted."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import redis

_BASE = re.compile(rb"^\{([^{}]+):([^{}:]+)\}:")


@dataclass(frozen=True)
class RunInfo:
    """One run. memory: bytes of all its keys, as the server counts them. state: ``-`` without a trainer so far."""

    prefix: str
    name: str
    keys: int
    memory: int
    state: str
    step: int


def list_runs(client: redis.Redis) -> list[RunInfo]:
    """All runs of one server, largest first."""
    found: dict[tuple[str, str], list[bytes]] = {}
    for key in client.scan_iter(match="{*:*}:*", count=1000):
        match = _BASE.match(key)
        if match:
            found.setdefault((match[1].decode(), match[2].decode()), []).append(key)
    runs = [_info(client, prefix, name, keys) for (prefix, name), keys in found.items()]
    return sorted(runs, key=lambda run: -run.memory)


def _info(client: redis.Redis, prefix: str, name: str, keys: list[bytes]) -> RunInfo:
    ctl = f"{{{prefix}:{name}}}:ctl"
    state: Any = None
    step: Any = None
    if client.type(ctl) == b"hash":
        state, step = client.hmget(ctl, "state", "step")
    return RunInfo(
        prefix=prefix,
        name=name,
        keys=len(keys),
        memory=sum(memory_of(client, key) for key in keys),
        state=state.decode() if state else "-",
        step=int(step) if step else 0,
    )


def memory_of(client: redis.Redis, key: bytes | str) -> int:
    """Bytes that a key takes, 0 when it has gone meanwhile."""
    used: Any = client.memory_usage(key, samples=20)
    return int(used or 0)
