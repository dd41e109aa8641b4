"""Dead letters never take the memory that work needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.client import Broker
from broker.connection import acl
from broker.connection.connection import Connection, open_client
from broker.connection.embedded import EmbeddedServer
from broker.connection.keys import Keys
from broker.queues.dead_letters import letter_bytes
from schemas.codec import encode
from schemas.config import BrokerConfig
from schemas.messages import DeadLetter, Score
from tests.support.broker.prompt_groups import make_task, make_trajectory
from tests.support.broker.trainer_sessions import take_over

pytestmark = pytest.mark.integration

KEYS = Keys("tidemill", "letters")
MB = 1024 * 1024


@pytest.fixture
def small_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path, fsync="no")
    server.start()
    yield server
    server.stop()


def connect(url: str) -> Broker:
    config = BrokerConfig(deadline_s=2)
    return Broker(Connection(url, KEYS, config.deadline_s), config)


def fail_samples(broker: Broker, count: int, payload: bytes) -> None:
    """Admit a group, and fail each of its samples but the last."""
    take_over(broker)
    broker.ledger.admit(make_task(0, n=count + 1))
    broker.task_queue("g").read(1, 10)
    for sample in range(count):
        letter = DeadLetter(source="x", reason="no", deliveries=1, payload=payload, task_id=0, sample=sample)
        score = Score(status="error", reason="no")
        broker.connection.run_script("fail_sample", 0, sample, letter_bytes(letter, len(payload)), encode(score), "")


def test_the_newest_letters_are_kept_up_to_a_number_of_bytes(broker: Broker) -> None:
    fail_samples(broker, 9, b"x" * (8 * MB))
    used: Any = broker.connection.client.memory_usage(broker.connection.keys.dead, samples=0)
    assert 48 * MB < used <= 64 * MB
    samples = [filed.letter.sample for filed in broker.dead_letters.list()]
    assert samples == list(range(9))[-len(samples) :]
    assert broker.ledger.read_state().dead_letters == 9, "all are counted"


def test_old_dead_letters_make_room_for_work_when_memory_is_full(small_server: EmbeddedServer) -> None:
    broker = connect(small_server.url)
    fail_samples(broker, 40, b"x" * (MB // 2))
    fill_memory(small_server)
    assert broker.task_queue("g").publish(0, [make_trajectory(0, 40)]) == ["ok"]
    left = [filed.letter.sample for filed in broker.dead_letters.list()]
    assert left, "no more of them go than is needed"
    assert left[-1] == 39


def test_the_user_of_each_service_may_make_room(small_server: EmbeddedServer) -> None:
    fail_samples(connect(small_server.url), 40, b"x" * (MB // 2))
    client: Any = open_client(small_server.url)
    passwords = acl.new_passwords()
    for line in acl.acl_lines(KEYS, passwords):
        client.execute_command(*line.split())
    fill_memory(small_server)
    roles = {
        role: connect(f"unix://{acl.user(role, KEYS)}:{password}@{small_server.socket}")
        for role, password in passwords.items()
    }
    assert roles["feeder"].ledger.admit(make_task(1)).answer == "ok"
    fill_memory(small_server)
    assert roles["generator"].task_queue("g").publish(0, [make_trajectory(0, 40)]) == ["ok"]
    fill_memory(small_server)
    for role in ("feeder", "generator", "reward", "trainer"):
        roles[role].connection.run_script("drop_dead_letters", MB)


def fill_memory(server: EmbeddedServer) -> None:
    """Let the server refuse whatever needs memory, as one that letters have filled."""
    client = open_client(server.url)
    used: Any = client.info("memory")["used_memory"]
    client.config_set("maxmemory", used - MB)
