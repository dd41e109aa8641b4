"""``tidemill acl --files``: what a server and the services of each role are given, so that each has its own user."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from broker.client import Broker
from broker.connection import acl
from broker.connection.connection import Connection, open_client
from broker.connection.embedded import EmbeddedServer, wait_ready
from broker.connection.keys import Keys
from schemas.config import BrokerConfig
from schemas.errors import ConfigError
from tests.support.broker.prompt_groups import make_task
from tests.support.broker.trainer_sessions import take_over
from tests.support.runs.command_line import run_tidemill

CONFIG = """
run: {name: mine}
model: {path: m}
train: {name: arithmetic}
reward: {terms: [{name: exact}]}
"""


def server_of(folder: Path) -> EmbeddedServer:
    server = EmbeddedServer(folder / "broker")
    server.prepare()
    return server


@contextmanager
def running(folder: Path, users: Path) -> Iterator[str]:
    """A server that was given the written users; yields its URL as the administrator."""
    server = server_of(folder)
    program, *options = server.command()
    process = subprocess.Popen([program, str(users / "server" / "users.conf"), *options], stdout=subprocess.DEVNULL)
    password = (users / "server" / "password").read_text().strip()
    url = f"unix://default:{password}@{server.socket}"
    try:
        wait_ready(url, 30)
        yield url
    finally:
        process.terminate()
        process.wait(10)


def write(folder: Path) -> Path:
    (folder / "config.yaml").write_text(CONFIG)
    done = run_tidemill("acl", "config.yaml", "--files", "users", "--url", server_of(folder).url, cwd=folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder / "users"


def connect(url: str) -> Broker:
    config = BrokerConfig(deadline_s=5)
    return Broker(Connection(url, Keys("tidemill", "mine"), config.deadline_s), config)


def test_each_role_can_do_its_work_with_the_url_that_was_written_for_it(tmp_path: Path) -> None:
    users = write(tmp_path)
    assert {path.name for path in users.iterdir()} == {"server", *acl.ROLES}
    with running(tmp_path, users) as administrator:
        roles = {role: connect((users / role / "redis_url").read_text().strip()) for role in acl.ROLES}
        take_over(roles["trainer"])
        assert roles["feeder"].ledger.admit(make_task(0)).answer == "ok"
        assert len(roles["generator"].task_queue("g").read(10, 10)) == 1
        assert roles["reward"].score_queue("r").read(10, 10) == []
        assert roles["observer"].ledger.read_state().active == 1
        assert roles["operator"].heartbeats.list() == []
        for role in ("feeder", "generator", "reward", "trainer", "operator"):
            assert roles[role].heartbeats.read_age_s("x") is None, "what `tidemill ready` asks"
            roles[role].heartbeats.read_clock()
        with pytest.raises(ConfigError, match="refuses"):
            roles["reward"].weights.newest()
        assert open_client(administrator).dbsize() > 0
        with pytest.raises(redis.AuthenticationError):
            open_client(EmbeddedServer(tmp_path / "broker").url).dbsize()


def test_passwords_are_kept_and_are_in_no_file_that_others_can_read(tmp_path: Path) -> None:
    users = write(tmp_path)
    files = sorted(path for path in users.rglob("*") if path.is_file())
    before = {path: path.read_text() for path in files}
    write(tmp_path)
    assert {path: path.read_text() for path in files} == before
    readable = [path for path in files if path.stat().st_mode & 0o077]
    assert readable == [users / "server" / "users.conf"]
    secrets = [before[path].strip().rpartition("@")[0].rpartition(":")[2] for path in files if path.name == "redis_url"]
    secrets.append(before[users / "server" / "password"].strip())
    assert len(set(secrets)) == len(acl.ROLES) + 1
    assert not any(secret in before[readable[0]] for secret in secrets)


def test_users_and_the_files_they_are_in_are_told_as_json(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    made = json.loads(run_tidemill("acl", "config.yaml", "--json", cwd=tmp_path).stdout)
    assert {user["role"] for user in made["users"]} == set(acl.ROLES)
    assert all(user["user"] in " ".join(made["acl"]) for user in made["users"])
    files = json.loads(run_tidemill("acl", "config.yaml", "--files", "users", "--json", cwd=tmp_path).stdout)
    assert all((tmp_path / file).is_file() for file in (*files["urls"].values(), files["users"], files["password"]))


def test_a_url_with_a_user_or_of_another_kind_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    for url in ("redis://u:pw@h:1/0", "http://h", "h:6379"):
        done = run_tidemill("acl", "config.yaml", "--files", "users", "--url", url, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert "--url must be a redis://, rediss:// or unix:// URL without a user" in done.stderr
        assert "pw" not in done.stderr
    assert not (tmp_path / "users").exists()
