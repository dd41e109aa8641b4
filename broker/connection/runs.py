"""The runs on a server: their names and sizes, and whether this version of Tidemill can read them."""

import re
from dataclasses import dataclass
from typing import Any

import redis

from broker.connection.keys import Keys
from schemas.codec import SCHEMA_VERSION
from schemas.errors import ConfigError

_BASE = re.compile(rb"^\{([^{}]+):([^{}:]+)\}:")


@dataclass(frozen=True)
class RunInfo:
    """A run on the server. memory: bytes of all its keys, as the server counts them. state: ``-`` before a trainer.

    changed: Unix time of its newest event; 0 without events.
    """

    prefix: str
    name: str
    keys: int
    memory: int
    state: str
    step: int
    changed: float


def list_runs(client: redis.Redis) -> list[RunInfo]:
    """List the runs of a server, largest first."""
    found: dict[tuple[str, str], list[bytes]] = {}
    for key in client.scan_iter(match="{*:*}:*", count=1000):
        match = _BASE.match(key)
        if match:
            found.setdefault((match[1].decode(), match[2].decode()), []).append(key)
    runs = [_info(client, prefix, name, keys) for (prefix, name), keys in found.items()]
    return sorted(runs, key=lambda run: -run.memory)


def _info(client: redis.Redis, prefix: str, name: str, keys: list[bytes]) -> RunInfo:
    base = Keys(prefix, name)
    known: Any = client.hmget(base.ctl, "state", "step") if client.type(base.ctl) == b"hash" else (None, None)
    newest: Any = client.xrevrange(base.events, count=1) if client.type(base.events) == b"stream" else []
    state, step = known
    return RunInfo(
        prefix=prefix,
        name=name,
        keys=len(keys),
        memory=sum(memory_of(client, key) for key in keys),
        state=state.decode() if state else "-",
        step=int(step) if step else 0,
        changed=int(newest[0][0].partition(b"-")[0]) / 1000 if newest else 0.0,
    )


def check_schema(client: redis.Redis, keys: Keys) -> None:
    """Check that the run's data has this version's layout of messages and keys; ConfigError otherwise."""
    try:
        found: Any = client.hmget(keys.ctl, "schema", "step")
    except redis.exceptions.NoPermissionError:
        # Generators and reward services may not see the control state; feeder and trainer refuse the run.
        return
    except redis.ResponseError as error:
        # The trainer that takes the run over repairs a key of the wrong type.
        if "WRONGTYPE" in str(error):
            return
        raise
    schema, step = found
    if schema == b"%d" % SCHEMA_VERSION or (schema is None and step is None):
        return
    version = int(schema) if schema is not None and schema.isdigit() else 1
    other = "an older" if version < SCHEMA_VERSION else "a newer"
    raise ConfigError(
        f"run {keys.run!r} was written by {other} Tidemill (schema {version}, this one reads {SCHEMA_VERSION}): finish"
        f" it with that version, or delete it: `tidemill purge {keys.run}`, or `tidemill up --fresh` for its files, too"
    )


def memory_of(client: redis.Redis, key: bytes | str) -> int:
    """Return the bytes that a key takes, 0 if it was deleted meanwhile."""
    used: Any = client.memory_usage(key, samples=20)
    return int(used or 0)
