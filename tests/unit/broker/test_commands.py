"""Commands to the server: packed as hiredis packs them, and reported if TLS was asked for and is not used."""

from typing import Any

import pytest
from redis.connection import HiredisRespSerializer
from structlog.testing import capture_logs

from broker.connection.connection import CommandPacker
from broker.weights.transports.broadcast import warn_unencrypted


@pytest.mark.parametrize(
    "args",
    [
        ("HSET", "key", "field.0", b"", "größe", b"x", "field.1", bytes(range(256)) * 100),
        ("HSET", "key", "field.0", bytes(range(256)) * 100, "field.1", b"x"),
        ("HSET", "key", "number", 3, "field.1", bytes(range(256)) * 100),
        ("HSET", "key", "number", 3, "share", 0.5),
        ("HSET", "key", "view", memoryview(b"abc")),
        ("CONFIG GET", "maxmemory"),
        ("PING",),
    ],
)
def test_a_command_is_packed_as_by_hiredis(args: tuple[Any, ...]) -> None:
    assert b"".join(CommandPacker().pack(*args)) == b"".join(HiredisRespSerializer().pack(*args))


@pytest.mark.parametrize(("url", "lines"), [("rediss://broker:6379/0", 1), ("redis://broker:6379/0", 0)])
def test_a_line_says_that_broadcasts_have_no_tls_where_the_broker_has(url: str, lines: int) -> None:
    with capture_logs() as found:
        warn_unencrypted(url)
    assert len(found) == lines
    assert all("broadcasts of weights are not encrypted; set peer" in line["event"] for line in found)
