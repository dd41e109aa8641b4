"""A primary and its replica behind Redis Sentinel, as real servers."""

import subprocess
import time
from pathlib import Path

from broker.connection.connection import open_client
from broker.connection.embedded import EmbeddedServer, find_server, wait_ready
from schemas.errors import InfraError
from tests.support.runs.programs import free_port

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
