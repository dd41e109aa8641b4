"""Runs on a broker: finding one, listing and purging them, and users for the server."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import redis
from rich.console import Console
from rich.table import Table

from broker.client import Broker
from broker.connection import acl
from broker.connection.connection import Connection, check_server_now, find_url, open_client
from broker.connection.keys import Keys
from broker.connection.runs import RunInfo, check_schema, list_runs
from schemas.config import BrokerConfig, TidemillConfig, load_config
from schemas.errors import ConfigError
from schemas.urls import hide_password

DEADLINE_S = 5.0
SOCKET = "broker/broker.sock"
RUNS = Path("runs")


def find(run: str, url: str | None, prefix: str, *, any_schema: bool = False) -> Broker:
    """The broker of a run, by its name or its configuration file; ConfigError says what was looked for.

    Without ``url`` that is broker.url or REDIS_URL, else the embedded server in the run's folder. any_schema: also a
    run that another version of Tidemill wrote, which can only be purged.
    """
    config: TidemillConfig | None = None
    if run.endswith((".yaml", ".yml")):
        config = load_config(run)
        run, prefix = config.run.name, config.broker.prefix
    folder = config.folder if config else RUNS / run
    found = url or find_url(config.broker.url if config else None) or embedded(folder)
    if found is None:
        raise ConfigError(
            f"no broker for run {run!r}: no embedded one answers at {folder / SOCKET}; give --url or set REDIS_URL,"
            " or start the run with `tidemill up`"
        )
    check_server_now(found)
    settings = BrokerConfig(deadline_s=DEADLINE_S, prefix=prefix)
    broker = Broker(Connection(found, Keys(prefix, run), DEADLINE_S), settings)
    if not broker.connection.run("looking for the run", lambda client: client.exists(broker.connection.keys.ctl)):
        known = ", ".join(sorted(info.name for info in list_runs(broker.connection.client))) or "none"
        raise ConfigError(f"no run {run!r} at {hide_password(found)}; runs there: {known}")
    if not any_schema:
        broker.connection.run("looking at the run", check_schema, broker.connection.keys)
    return broker


def embedded(folder: Path) -> str | None:
    """URL of the embedded server in a run's folder, None when there is none that answers."""
    socket = (folder / SOCKET).resolve()
    url = f"unix://{socket}"
    if not socket.exists():
        return None
    try:
        open_client(url).ping()
    except redis.RedisError:
        return None
    return url


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def show_runs(url: str | None, as_json: bool) -> None:
    """Runs of one server, or of every embedded server under runs/."""
    found = url or find_url(None)
    urls = [found] if found else [each for folder in sorted(RUNS.glob("*")) if (each := embedded(folder))]
    if not urls:
        raise ConfigError(f"no broker: give --url or set REDIS_URL; no embedded one answers under {RUNS}{os.sep}")
    infos: list[RunInfo] = []
    for each in urls:
        check_server_now(each)
        infos += list_runs(open_client(each))
    if as_json:
        print(json.dumps([asdict(info) for info in infos]))
        return
    table = Table("run", "state", "step", "memory", "keys", box=None)
    for info in infos:
        table.add_row(info.name, info.state, str(info.step), size(info.memory), str(info.keys))
    Console().print(table if infos else "no runs")


def purge(broker: Broker, run: str, yes: bool) -> None:
    """Delete a run after asking; a run whose services are alive is named as such."""
    alive = broker.heartbeats.list_names()
    if not yes:
        note = f" It has services: {', '.join(alive)}." if alive else ""
        if input(f"Delete all data of run {run} in the broker ({size(broker.measure_memory())})?{note} [y/N] ") != "y":
            print("nothing was deleted")
            return
    print(f"deleted {broker.purge()} keys")


def print_users(config: TidemillConfig) -> None:
    """ACL lines for the server on stdout, user names with new passwords on stderr."""
    keys = Keys(config.broker.prefix, config.run.name)
    passwords = acl.new_passwords()
    for line in acl.acl_lines(keys, passwords):
        print(line)
    for role, password in passwords.items():
        print(acl.user(role, keys), password, file=sys.stderr)
