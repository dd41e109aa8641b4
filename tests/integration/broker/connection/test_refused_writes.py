"""A server that refuses writes while too few replicas follow it: each is made again, and nothing is lost or doubled."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from broker.client import Broker
from broker.connection.connection import Connection, open_client
from broker.connection.embedded import EmbeddedServer
from broker.connection.keys import Keys
from schemas.config import BrokerConfig
from tests.support.broker.one_group import move_one_group

ROLES = ("feeder", "generator", "reward", "trainer", "observer")


def test_each_write_refused_for_want_of_replicas_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = EmbeddedServer(tmp_path)
    server.start()
    beside = open_client(server.url)
    run = Connection.run

    def run_refused_at_first(
        self: Connection, what: str, operation: Callable[..., Any], *args: Any, once: bool = False
    ) -> Any:
        wanted = 1

        def attempt(client: Any, *given: Any) -> Any:
            nonlocal wanted
            beside.config_set("min-replicas-to-write", wanted)
            wanted = 0
            try:
                return operation(client, *given)
            finally:
                beside.config_set("min-replicas-to-write", 0)

        return run(self, what, operation if once else attempt, *args, once=once)

    monkeypatch.setattr(Connection, "run", run_refused_at_first)
    monkeypatch.setattr("broker.connection.connection.random.uniform", lambda least, most: 0.0)
    try:
        config = BrokerConfig(deadline_s=5)
        broker = Broker(Connection(server.url, Keys("tidemill", "refused"), config.deadline_s), config)
        with capture_logs() as logs:
            move_one_group(dict.fromkeys(ROLES, broker), tmp_path)
        waits = [line for line in logs if "NOREPLICAS" in line.get("error", "")]
        assert {line["event"] for line in waits} == {"waiting for the broker"}
        assert len(waits) >= 10, "admission, samples, scores, journal, steps and weights were all refused once"
        state = broker.ledger.read_state()
        assert state.balanced
        assert (state.samples_published, state.samples_trained) == (2, 2)
    finally:
        server.stop()
