"""Finds, lists and purges runs on a broker and in folders. The broker's client is loaded only if there is a broker."""

from __future__ import annotations

import getpass
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deploy.control_plane.files.run_folder import RunFolder
from schemas.control_api.base import OVER
from schemas.control_api.run_folders import RunHead
from schemas.errors import ConfigError, RefusedError
from schemas.run_folder import RUNS, named_config
from schemas.urls import hide_password

if TYPE_CHECKING:
    from broker.client import Broker
    from broker.connection.runs import RunInfo
    from broker.flow.owner import Owner

    FolderOf: TypeAlias = Callable[[Owner], tuple[Path, Callable[[], None]]]

DEADLINE_S = 5.0
SOCKET = "broker/server-*/broker.sock"
URLS = ("REDIS_URL", "REDIS_URL_FILE")
"""Environment variables that name a server."""


class NoSuchRun(ConfigError):
    """No known broker has the run."""


def find(run: str, url: str | None, prefix: str, *, any_schema: bool = False) -> Broker:
    """Return the broker of a run, by its name or its configuration file; ConfigError lists what was searched.

    Without ``url``, it is broker.url, REDIS_URL or the embedded server in the run's folder. any_schema: accept a run
    that another version of Tidemill wrote, which can only be purged.
    """
    config = named_config(run)
    if config is not None:
        run, prefix = config.run.name, config.broker.prefix
    folder = config.folder if config else RUNS / run
    named = url or (config and config.broker.url)
    nowhere = NoSuchRun(
        f"no broker for run {run!r}: no embedded one answers in {folder / 'broker'}; give --url or set REDIS_URL,"
        " or start the run with `tidemill up`"
    )
    if not (named or any(map(os.environ.get, URLS))) and not any(folder.glob(SOCKET)):
        raise nowhere
    from broker.client import Broker
    from broker.connection.connection import Connection, check_server_now, find_url
    from broker.connection.keys import Keys
    from broker.connection.runs import check_schema, list_runs
    from schemas.config import BrokerConfig

    found = url or find_url(config.broker.url if config else None) or embedded(folder)
    if found is None:
        raise nowhere
    check_server_now(found)
    settings = BrokerConfig(deadline_s=DEADLINE_S, prefix=prefix)
    broker = Broker(Connection(found, Keys(prefix, run), DEADLINE_S), settings)
    if not broker.connection.run_command("looking for the run", "exists", broker.connection.keys.ctl):
        known = ", ".join(sorted(info.name for info in list_runs(broker.connection.client))) or "none"
        raise NoSuchRun(f"no run {run!r} at {hide_password(found)}; runs there: {known}")
    if not any_schema:
        broker.connection.run("looking at the run", check_schema, broker.connection.keys)
    return broker


def finished_run(run: str) -> RunFolder | None:
    """Return a run's folder, by its name or its configuration file; None if it does not exist."""
    config = named_config(run)
    found = RunFolder(config.folder, config.run.name) if config else RunFolder(RUNS / run)
    return found if found.head() is not None else None


def head_rows(head: RunHead, summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the names and values that describe a run from its folder. summary: the content of its summary.json."""
    lines = [
        ("state", f"{head.state}: {head.cause}" if head.cause else head.state),
        ("step", f"{head.step} of {'?' if head.steps is None else head.steps}"),
        ("reward", "-" if head.reward is None else f"{head.reward:.4g} in the last step"),
    ]
    if head.accuracy is not None:
        before = "-" if head.accuracy_before is None else f"{head.accuracy_before:.1%}"
        lines.append(("held-out", f"accuracy {before} before, {head.accuracy:.1%} after"))
    elif head.heldout_reward is not None:
        before = "-" if head.heldout_reward_before is None else f"{head.heldout_reward_before:.3f}"
        lines.append(("held-out", f"reward {before} before, {head.heldout_reward:.3f} after"))
    if summary.get("trajectories") is not None:
        lost, twice = summary.get("trajectories_lost"), summary.get("trajectories_trained_twice")
        lost = "an unknown number" if lost is None else lost
        lines.append(("trajectories", f"{summary['trajectories']:,}, {lost} lost, {twice} trained twice"))
    return [*lines, ("last change", date(head.updated)), ("folder", head.folder)]


def list_heads() -> Iterator[RunHead]:
    """Yield the runs in runs/, by name."""
    for folder in sorted(RUNS.glob("*")):
        if folder.is_dir() and (head := RunFolder(folder).head()) is not None:
            yield head


def whoami() -> str:
    """Return the user and machine that give a command, for the timeline."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # A container's user may have no name.
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def date(at: float) -> str:
    """Return a time as text."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def embedded(folder: Path) -> str | None:
    """Return the URL of the embedded server in a run's folder; None if none answers."""
    if not any(folder.glob(SOCKET)):
        return None
    from broker.connection.embedded import find_running

    return find_running(folder / "broker")


def size(count: float) -> str:
    """Return a number of bytes as text."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _runs_on_brokers(url: str | None) -> list[RunInfo]:
    if not (url or any(map(os.environ.get, URLS))) and not any(RUNS.glob(f"*/{SOCKET}")):
        return []
    from broker.connection.connection import check_server_now, find_url, open_client
    from broker.connection.runs import list_runs

    found = url or find_url(None)
    urls = [found] if found else [each for folder in sorted(RUNS.glob("*")) if (each := embedded(folder))]
    infos: list[RunInfo] = []
    for each in urls:
        check_server_now(each)
        infos += list_runs(open_client(each))
    return infos


def show_runs(url: str | None, as_json: bool) -> None:
    """Print the runs of one server; without ``url``, of each embedded server and each folder under runs/."""
    infos = _runs_on_brokers(url)
    # Folders here may belong to other runs than those of the same name on a server that was named.
    folders = {} if url else {run.name: run for run in list_heads()}
    rows: list[dict[str, Any]] = []
    for info in infos:
        rows.append({**asdict(info), **_found(folders.pop(info.name, None))})
    for left in folders.values():
        here = {"prefix": None, "name": left.name, "keys": 0, "memory": 0, "state": left.state, "step": left.step}
        rows.append({**here, **_found(left)})
    if as_json:
        print(json.dumps(rows))
        return
    table = Table("run", "state", "step", "reward", "last change", "memory", "keys", box=None)
    for row in rows:
        reward = "-" if row["reward"] is None else f"{row['reward']:.4g}"
        changed = "-" if row["updated"] is None else date(row["updated"])
        memory, keys = (size(row["memory"]), str(row["keys"])) if row["keys"] else ("-", "-")
        table.add_row(row["name"], row["state"], str(row["step"]), reward, changed, memory, keys)
    Console().print(table if rows else "no runs")
    for row in rows:
        # Below the table, whose columns fill a terminal.
        if words := ". ".join(filter(None, (", ".join(row["tags"]), row["notes"]))):
            Console().print(escape(f" {row['name']}: {words}"), highlight=False)


def _found(head: RunHead | None) -> dict[str, Any]:
    nothing: dict[str, Any] = {"reward": None, "updated": None, "tags": [], "notes": None}
    return nothing if head is None else {name: getattr(head, name) for name in nothing}


def purge(
    broker: Broker, run: str, yes: bool, force: bool = False, as_json: bool = False, files: FolderOf | None = None
) -> None:
    """Delete a run after confirmation; RefusedError while its services are alive, unless ``force`` is given.

    files: finds its folder, which is deleted, too; ConfigError, and nothing is deleted, if it is not on this machine.
    """
    from broker.flow.owner import NO_OWNER
    from deploy.control_plane.status.run_state import LIVE_S

    alive = broker.heartbeats.list_heard(LIVE_S)
    if alive and (files or not force):
        remedy = "stop it first" if files else "stop it first, or add --force, which loses work in flight"
        raise RefusedError(
            f"run {run!r} is alive, with heartbeats of {', '.join(alive)} in the last {LIVE_S:.0f} s: {remedy}"
        )
    folder, delete_folder = files(broker.owner.read() or NO_OWNER) if files else (None, lambda: None)
    if not yes:
        note = f" It has services: {', '.join(alive)}." if alive else ""
        more = f", and {folder} with its checkpoints" if folder else ""
        memory = size(broker.measure_memory())
        if input(f"Delete all data of run {run} in the broker ({memory}){more}?{note} [y/N] ") != "y":
            print("nothing was deleted")
            return
    deleted = broker.purge()
    delete_folder()
    found = {"run": run, "deleted_keys": deleted} | ({"deleted_folder": str(folder)} if folder else {})
    print(json.dumps(found) if as_json else f"deleted {deleted} keys of run {run}{f' and {folder}' if folder else ''}")


def purge_ended(url: str | None, days: float, yes: bool, as_json: bool = False, files: FolderOf | None = None) -> None:
    """Delete the runs that ended ``days`` or more days ago, after confirmation; a run that ``purge`` refuses stays."""
    before = time.time() - days * 86_400
    ended = [run for run in _runs_on_brokers(url) if run.state in OVER and 0 < run.changed <= before]
    if not yes and ended:
        names = ", ".join(f"{run.name} ({date(run.changed)}, {size(run.memory)})" for run in ended)
        more = ", and their folders with their checkpoints" if files else ""
        if input(f"Delete all data of {len(ended)} runs in the broker{more}: {names}? [y/N] ") != "y":
            print("nothing was deleted")
            return
    for run in ended:
        try:
            purge(find(run.name, url, run.prefix, any_schema=True), run.name, True, as_json=as_json, files=files)
        except (RefusedError, ConfigError) as error:
            print(f"run {run.name} stays: {error}", file=sys.stderr)
    if not ended and not as_json:
        print(f"no run ended {days:g} or more days ago")
