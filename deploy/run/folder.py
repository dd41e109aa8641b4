"""The folder of a run before its services start: locked, known as this run's, and with the record of earlier attempts.

Foreign data is neither written nor deleted: another run's name or settings, a run that is alive, and a folder that
is not a run's are rejected first, in one line each.
"""

import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import IO, Any

from broker.client import Broker
from broker.connection.connection import check_server_now, find_url
from broker.flow.owner import Owner
from broker.heartbeat import refuse_copy
from deploy.control_plane.files.run_folder import flatten, mask
from deploy.control_plane.status.run_state import LIVE_S
from schemas.config import TidemillConfig, load_config, save_config
from schemas.errors import ConfigError, InfraError
from schemas.run_folder import CONFIG, LOCK, PYTHON, SUMMARY, is_run_folder, is_run_name, read_object
from schemas.run_record import check_record, claim_folder, read_record
from schemas.urls import hide_password

NOT_SHOWN = ("run.base", "run.folder", "probes.")
"""Settings whose change says nothing of the training."""


@contextmanager
def sole_user(folder: Path) -> Iterator[None]:
    """Lock the run's folder: only one ``tidemill up`` may use it; the lock goes with the process, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+", encoding="utf-8") as lock:
        if not try_lock(lock, folder):
            lock.seek(0)
            holder = lock.read().strip() or "since just now"
            raise InfraError(
                f"another `tidemill up` uses the folder {folder} ({holder}): stop it, or give this run another run.name"
            )
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M')}\n")
        lock.flush()
        yield


def try_lock(file: IO[str], folder: Path) -> bool:
    """Lock a file of ``folder`` until it is closed; False if another process has it, ConfigError if none can."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConfigError(
            f"run.folder must be on a file system with locks: a file in {folder} cannot be locked: {error.strerror}"
        ) from error
    return True


def is_finished(folder: Path, steps: int) -> bool:
    """Return whether the run has ended with all these optimizer steps behind it."""
    summary = read_object(folder / SUMMARY)
    return bool(summary.get("exit_reason") == "finished" and summary.get("steps", 0) >= steps)


def refuse_finished(config: TidemillConfig) -> None:
    """Raise ConfigError if all steps of the run are behind it."""
    if is_finished(config.folder, config.trainer.steps):
        raise ConfigError(
            f"run {config.run.name!r} in {config.folder} is finished: increase trainer.steps, add --fresh to delete it"
            " and start over, or choose another run.name"
        )


def refuse_foreign(config: TidemillConfig, fresh: bool) -> None:
    """Raise ConfigError, before anything is written, if this run may not start or resume in its folder.

    fresh: whether the run's files there are to be deleted first.
    """
    folder = config.folder
    record = read_record(folder) if fresh else check_record(config)
    url = find_url(config.broker.url)
    if url is not None:
        check_server_now(url)
        broker, owner = Broker.connect(config, any_schema=fresh), Owner.of(record.id if record else "", folder)
        broker.owner.refuse_other(owner, forget=fresh)
        refuse_copy(broker, owner)
    if not fresh:
        return
    if not is_run_folder(folder):
        raise ConfigError(f"--fresh deletes nothing in {folder}: it is not empty, and no folder of a run")
    model = Path(config.model.path).resolve()
    if model.is_relative_to(folder) and model != folder and is_run_name(model.relative_to(folder).parts[0]):
        raise ConfigError(f"--fresh would delete model.path {model}: move it out of the run's folder {folder}")


def claim_name(config: TidemillConfig) -> None:
    """Make the folder this run's, and take the name at a broker that is there already; ConfigError if it is taken."""
    record = claim_folder(config)
    # A server of its own, in its folder, is yet to start.
    if find_url(config.broker.url) is not None:
        Broker.connect(config).owner.claim(Owner.of(record.id, config.folder))


def settle_configuration(config: TidemillConfig) -> list[str]:
    """Write the configuration for the services, and keep those of earlier attempts and their summaries aside.

    Returns the settings that changed since the last attempt, such as ``trainer.steps 10 -> 20``.
    """
    file, new = config.folder / CONFIG, config.folder / f".{CONFIG}.new"
    save_config(config, new)
    changes: list[str] = []
    if file.is_file() and file.read_bytes() != new.read_bytes():
        changes = changed_settings(file, new)
        keep_aside(file)
    new.replace(file)
    keep_aside(config.folder / SUMMARY)
    return changes


def keep_aside(file: Path) -> None:
    """Rename a file to its name with the next free number, ``config.yaml.1`` for the first, if it is there."""
    if file.is_file():
        names = (file.with_name(f"{file.name}.{number}") for number in count(1))
        file.rename(next(name for name in names if not name.exists()))


def changed_settings(old: Path, new: Path) -> list[str]:
    """Return the settings in which two configurations differ; none if the old one is no configuration of today."""
    try:
        before, after = (flatten(load_config(file, environment={}).model_dump(mode="json")) for file in (old, new))
    except ConfigError:
        return []
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return [
        f"{name} {_shown(name, before.get(name))} -> {_shown(name, after.get(name))}"
        for name in names
        if not name.startswith(NOT_SHOWN)
    ]


def forget_run(config: TidemillConfig) -> None:
    """Delete the run's files but the held lock, and its keys in a shared broker; ConfigError if services are alive."""
    shared = find_url(config.broker.url) is not None
    if shared:
        broker = Broker.connect(config, any_schema=True)
        alive = broker.heartbeats.list_heard(LIVE_S)
        if alive:
            raise ConfigError(
                f"--fresh deletes nothing: run {config.run.name!r} at {hide_password(broker.connection.url)} is alive,"
                f" with heartbeats of {', '.join(alive)} in the last {LIVE_S:.0f} s; stop it, or set another run.name"
            )
        broker.purge()
    elif _server_runs(config.folder / "broker"):
        raise ConfigError(
            f"--fresh deletes nothing: a `tidemill broker` uses {config.folder / 'broker'}, stop it first"
        )
    # A broker that was started for the run has its data and password here, Python what it has just written.
    _delete_files(config.folder, {LOCK, PYTHON, "broker", "redis_url"} if shared else {LOCK, PYTHON})


def ended_folder(owner: Owner) -> tuple[Path, Callable[[], None]]:
    """Return an ended run's folder and what deletes its files; ConfigError if elsewhere, another run's, or in use."""
    folder = Path(owner.folder)
    record = read_record(folder) if folder.is_absolute() else None
    if record is None or record.id != owner.id:
        raise ConfigError(
            f"--files deletes nothing: {owner.folder or 'its folder'} is not here, or another run's; the run began on"
            f" {owner.host or 'an unknown machine'}"
        )
    if _server_runs(folder / "broker"):
        raise ConfigError(f"--files deletes nothing: a `tidemill broker` uses {folder / 'broker'}, stop it first")
    with sole_user(folder):
        return folder, partial(_delete_folder, folder)


def _delete_folder(folder: Path) -> None:
    with sole_user(folder):
        _delete_files(folder, set())
        if not any(folder.iterdir()):
            folder.rmdir()


def _delete_files(folder: Path, kept: Collection[str]) -> None:
    for path in folder.iterdir():
        if path.name in kept or not is_run_name(path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _server_runs(folder: Path) -> bool:
    """Return whether a server that was started by itself has its data here."""
    if not (folder / "lock").is_file():
        return False
    with (folder / "lock").open("a") as lock:
        return not try_lock(lock, folder)


def _shown(name: str, value: Any) -> str:
    value = mask(name, value)
    text = value if isinstance(value, str) else "none" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
