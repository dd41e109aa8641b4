"""``tidemill broker``: a server for services on several machines, with a password, its data in the run's folder.

Promises: who reads the file with its URL finds a server that answers; the password is the same after a restart and on
no command line; nothing is left behind when this process ends.
"""

import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from broker.connection.connection import open_client
from broker.connection.embedded import find_running, find_server
from deploy.run.folder import try_lock
from deploy.supervisor.process import Process
from schemas.config import TidemillConfig
from schemas.errors import OK_EXIT, ConfigError, InfraError
from schemas.system.files import atomic_write
from schemas.system.lifecycle import StopFlag

START_DEADLINE_S = 300.0
"""How long it may read what it wrote before."""
STOP_DEADLINE_S = 60.0
LOOK_S = 0.1


def run_broker(config: TidemillConfig, host: str | None, port: int, url_file: Path | None) -> int:
    """Serve until SIGTERM or Ctrl-C. host: name of this machine for the others, its own by default.

    url_file: gets the URL once the server answers, ``redis_url`` in the run's folder by default. ConfigError if
    the run's data is in use; InfraError if the server ends by itself.
    """
    stop = StopFlag().install()
    folder = config.folder / "broker"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    url_file = url_file or config.folder / "redis_url"
    with _sole_user(folder):
        password_file = folder / "password"
        if not password_file.is_file():
            atomic_write(password_file, secrets.token_urlsafe(24), private=True)
        password = password_file.read_text(encoding="utf-8").strip()
        settings = folder / "broker.conf"
        atomic_write(settings, _settings(folder, port, password, config.broker.fsync), private=True)
        process = Process([find_server(), str(settings)], "broker")
        try:
            _wait_until_it_answers(process, f"redis://:{password}@127.0.0.1:{port}/0", stop)
            name = host or socket.gethostname()
            atomic_write(url_file, f"redis://:{password}@{name}:{port}/0\n", private=True)
            print(
                f"the broker listens at {name}:{port}; for the services: export REDIS_URL_FILE={url_file}", flush=True
            )
            while not stop.wait(LOOK_S):
                _check(process)
            process.terminate()
            _wait_until_it_ended(process)
        finally:
            process.kill()
            _wait_until_it_ended(process)
    return OK_EXIT


def _settings(folder: Path, port: int, password: str, fsync: str) -> str:
    settings = {
        "port": str(port),
        "bind": "* -::*",
        "requirepass": password,
        "dir": f'"{folder}"',
        "appendonly": "yes",
        "appendfsync": fsync,
        "save": '""',
        "maxmemory-policy": "noeviction",
    }
    return "".join(f"{key} {value}\n" for key, value in settings.items())


def _wait_until_it_answers(process: Process, url: str, stop: StopFlag) -> None:
    client = open_client(url)
    deadline = time.monotonic() + START_DEADLINE_S
    while not stop:
        _check(process)
        try:
            client.ping()
            return
        except redis.RedisError as error:
            if time.monotonic() > deadline:
                raise InfraError(f"the broker did not answer within {START_DEADLINE_S:.0f} s: {error}") from error
        stop.wait(LOOK_S)


def _wait_until_it_ended(process: Process) -> None:
    deadline = time.monotonic() + STOP_DEADLINE_S
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(LOOK_S)


def _check(process: Process) -> None:
    ended = process.poll()
    if ended is not None:
        raise InfraError(f"the broker's server ended ({ended}); it has said why above")


@contextmanager
def _sole_user(folder: Path) -> Iterator[None]:
    """Two servers on one append-only file would destroy it."""
    if find_running(folder):
        raise ConfigError(f"`tidemill up` has a broker in {folder}: stop it first")
    with (folder / "lock").open("w") as lock:
        if not try_lock(lock, folder):
            raise ConfigError(f"another `tidemill broker` uses {folder}: stop it first")
        os.set_inheritable(lock.fileno(), False)
        yield
