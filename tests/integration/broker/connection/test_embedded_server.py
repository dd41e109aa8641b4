"""The embedded server ends with the process that started it, however that process ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from broker.connection import embedded
from broker.connection.connection import open_client
from broker.connection.embedded import EmbeddedServer
from schemas.errors import InfraError

GONE_S = 20.0
ENDS_AT_ONCE = """
import os, sys
from pathlib import Path
from broker.connection.embedded import EmbeddedServer
with EmbeddedServer(Path(sys.argv[1])) as server:
    print(server.url, flush=True)
    os._exit(3)
"""


def wait_until_gone(url: str) -> None:
    client, end = open_client(url), time.monotonic() + GONE_S
    while True:
        try:
            client.ping()
        except redis.ConnectionError:
            return
        assert time.monotonic() < end, f"a server still answers at {url}"
        time.sleep(0.02)


def test_a_process_that_ends_without_clean_up_leaves_no_server(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDS_AT_ONCE, str(tmp_path / "broker")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=os.environ)
    assert done.returncode == 3, done.stderr
    wait_until_gone(done.stdout.strip())


def test_a_server_that_does_not_answer_in_time_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(url: str, *_: object) -> None:
        raise InfraError(f"the broker at {url} did not answer")

    monkeypatch.setattr(embedded, "wait_ready", never)
    server = EmbeddedServer(tmp_path / "broker")
    with pytest.raises(InfraError, match="did not answer"):
        server.start()
    wait_until_gone(server.url)
